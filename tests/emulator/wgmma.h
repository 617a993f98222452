// common/wgmma.cuh for the emulator: a product is computed where it is asked for, by each thread for its own results.
namespace tensor {

inline int swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
inline unsigned long long descriptor(const void* at) { return reinterpret_cast<uintptr_t>(at); }
inline unsigned long long along(unsigned long long descriptor, int bytes) { return descriptor + bytes; }
inline void shared_written() {}
template <int Count> inline void give_registers() {}
template <int Count> inline void take_registers() {}
template <bool Transposed> inline void store_matrices(void* row, const unsigned (&from)[4]) {
    const int g = (emulator::current & 31) / 4, t = emulator::current & 3;
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) {
            const int along = Transposed ? 2 * t + j : g, at = Transposed ? g : 2 * t + j;
            const auto to = emulator::shuffle(reinterpret_cast<unsigned long long>(row), 8 * i + along);
            reinterpret_cast<unsigned short*>(to)[at] = from[i] >> 16 * j;
        }
}
inline void keep(unsigned (&)[4]) {}
inline void group_begin() {}
inline void group_commit() {}
template <int Left, int N> inline void group_wait(float (&)[N]) {}

inline void aligned(unsigned long long at) {
    if ((at & ~0x7full) % 1024) { fprintf(stderr, "emulator: an operand is not aligned\n"); abort(); }
}

// Value k of a row of an operand: the address's bits 4 to 6 are turned by bits 7 to 9, as the hardware does it.
template <class T> inline float operand(unsigned long long descriptor, int row, int k) {
    unsigned long long at = descriptor + row * 128 + 2 * k;
    at ^= (at >> 7 & 7) << 4;
    return float(*reinterpret_cast<const T*>(at));
}

// Both kinds of second operand: `b(column, k)`.
template <class T> struct Along {
    unsigned long long at;
    Along(unsigned long long b) : at(b) { aligned(b); }
    float operator()(int column, int k) const { return operand<T>(at, column, k); }
};
// One that lies across: the address, and from bit 48 on the number of 8192 bytes to the next 64 columns.
inline unsigned long long turned_descriptor(const void* at, int further) {
    return reinterpret_cast<uintptr_t>(at) | (unsigned long long)(further >> 13) << 48;
}
template <class T> struct Turned {
    unsigned long long at, further;
    Turned(unsigned long long b) : at(b << 16 >> 16), further((b >> 48) << 13) { aligned(at); }
    float operator()(int column, int k) const { return operand<T>(at + column / 64 * further, k, column % 64); }
};

// The first operand in shared memory.
template <class T, class B, int N> inline void product(float (&d)[N], unsigned long long a, const B& b) {
    const int me = emulator::current, g = (me & 31) / 4, t = me & 3;
    aligned(a);
    for (int i = 0; i < N; ++i) {
        const int row = me % 128 / 32 * 16 + g + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += operand<T>(a, row, k) * b(column, k);
        d[i] += sum;
    }
}

// The first operand in registers: lane l has row l / 4 and the one eight below it, columns 2 * (l % 4) and the next, and
// the same eight further.
template <class T, class B, int N> inline void product(float (&d)[N], const unsigned (&a)[4], const B& b) {
    const int g = (emulator::current & 31) / 4, t = emulator::current & 3;
    float value[2][16];
    for (int i = 0; i < 4; ++i)
        for (int from = 0; from < 4; ++from) {
            const unsigned word = emulator::shuffle(a[i], 4 * g + from);
            T pair[2];
            memcpy(pair, &word, 4);
            for (int j = 0; j < 2; ++j) value[i % 2][i / 2 * 8 + 2 * from + j] = float(pair[j]);
        }
    for (int i = 0; i < N; ++i) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += value[i / 2 % 2][k] * b(i / 4 * 8 + 2 * t + i % 2, k);
        d[i] += sum;
    }
}
template <class T, int N, class A> inline void emulated_group_product(float (&d)[N], const A& a, unsigned long long b) {
    product<T>(d, a, Along<T>(b));
}
template <class T, int N, class A> inline void emulated_turned_product(float (&d)[N], const A& a, unsigned long long b) {
    product<T>(d, a, Turned<T>(b));
}

}  // namespace tensor
