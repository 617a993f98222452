// In front of a kernel whose clusters have several blocks: static shared memory whose bytes are exchanged as a whole
// when the scheduler goes on with another block. Thread-local variables of a library lie side by side, which those of
// templates and inline functions do not in a section: g++ leaves the ones out and takes the others for an error.
#include <link.h>

#undef __shared__
#define __shared__ static thread_local

namespace emulator {
static thread_local unsigned char any_shared;  // there is some
inline int find_static(dl_phdr_info* library, size_t, void*) {
    auto* const first = static_cast<unsigned char*>(library->dlpi_tls_data);
    for (int i = 0; first && i < library->dlpi_phnum; ++i) {
        const auto& part = library->dlpi_phdr[i];
        if (part.p_type != PT_TLS || &any_shared < first || &any_shared >= first + part.p_memsz) continue;
        static_shared = first;
        static_bytes = part.p_memsz;
        return 1;
    }
    return 0;
}
inline void find_static() {
    any_shared = 0;
    if (!dl_iterate_phdr(find_static, nullptr)) fail("static shared memory was not found");
    if (static_bytes > sizeof kept[0]) fail("a block has 48 KB of static shared memory at most");
}
}  // namespace emulator
