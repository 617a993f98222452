// common/bulk.cuh for the emulator: a box is there as soon as it is asked for. Clusters have one block.
namespace bulk {

// address, axes and swizzle, sizes (5), strides (4), box (5)
struct alignas(64) Map {
    unsigned long long words[16];
};
struct Barrier {
    unsigned arrivals : 10, left : 10, phase : 1;
    int bytes;
    void check() {
        if (left || bytes) return;
        left = arrivals;
        phase ^= 1;
    }
};

inline void init(Barrier& barrier, int arrivals) { barrier = {unsigned(arrivals), unsigned(arrivals), 0, 0}; }
inline void publish() {}
inline void expect(Barrier& barrier, int bytes) {
    barrier.bytes += bytes;
    --barrier.left;
    barrier.check();
}
inline void wait(Barrier& barrier, int parity) {
    for (int turn = 0; int(barrier.phase) == parity; ++turn) {
        if (turn > 1 << 20) { fprintf(stderr, "emulator: a barrier's phase does not end\n"); abort(); }
        emulator::wait(3);
    }
}
inline void arrive(Barrier& barrier, int rank) {
    if (rank) { fprintf(stderr, "emulator: clusters have one block\n"); abort(); }
    --barrier.left;
    barrier.check();
}

inline void box(void* to, const Map& map, Barrier& barrier, int blocks, const long long (&first)[5]) {
    const auto* words = map.words;
    const int axes = words[1] & 255, swizzle = words[1] >> 8;
    if (blocks != 1) { fprintf(stderr, "emulator: clusters have one block\n"); abort(); }
    if (reinterpret_cast<uintptr_t>(to) % 128) { fprintf(stderr, "emulator: a box is not aligned\n"); abort(); }
    long long count = 1;
    for (int i = 0; i < axes; ++i) count *= words[11 + i];
    for (long long i = 0; i < count; ++i) {
        unsigned long long from = words[0];
        long long rest = i;
        bool inside = true;
        for (int axis = 0; axis < axes; ++axis) {
            const long long at = first[axis] + rest % (long long)words[11 + axis];
            rest /= words[11 + axis];
            inside &= at >= 0 && at < (long long)words[2 + axis];
            from += at * (axis ? words[6 + axis] : 2);
        }
        // Bits of the address from 4 on are turned by those from 7 on, as many as a row of the swizzle has pieces.
        uintptr_t place = reinterpret_cast<uintptr_t>(to) + 2 * i;
        place ^= (place >> 7 & (swizzle / 16 - 1)) << 4;
        *reinterpret_cast<unsigned short*>(place) = inside ? *reinterpret_cast<const unsigned short*>(from) : 0;
    }
    barrier.bytes -= 2 * count;
    barrier.check();
}
inline void copy(void* to, const Map& map, Barrier& barrier, int blocks, int x, int y) {
    box(to, map, barrier, blocks, {x, y});
}
inline void fetch_map(const Map&) {}
inline void copy_line(void* to, const void* from, int bytes, Barrier& barrier, int blocks) {
    if (blocks != 1) { fprintf(stderr, "emulator: clusters have one block\n"); abort(); }
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16) {
        fprintf(stderr, "emulator: a piece of memory is not aligned\n");
        abort();
    }
    memcpy(to, from, bytes);
    barrier.bytes -= bytes;
    barrier.check();
}
template <int Threads> inline void sync_first() {
    emulator::some = Threads;
    emulator::wait(4);
}
inline void cluster_arrive() {}
inline void cluster_wait() {}

}  // namespace bulk
