// common/bulk.cuh, bulk_store.cuh and bulk_ring.cuh for the emulator: a box is there as soon as it is asked for. Clusters have
// one block.
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

// `each(place, in)` for the elements of a box from `first` on: the place in shared memory, and that in the tensor or
// null outside of it. Returns the box's bytes.
template <class Each>
inline long long box(const void* memory, const Map& map, const long long (&first)[5], const Each& each) {
    const auto* words = map.words;
    const int axes = words[1] & 255, swizzle = words[1] >> 8;
    if (reinterpret_cast<uintptr_t>(memory) % 128) { fprintf(stderr, "emulator: a box is not aligned\n"); abort(); }
    long long count = 1;
    for (int i = 0; i < axes; ++i) count *= words[11 + i];
    for (long long i = 0; i < count; ++i) {
        unsigned long long in = words[0];
        long long rest = i;
        bool inside = true;
        for (int axis = 0; axis < axes; ++axis) {
            const long long at = first[axis] + rest % (long long)words[11 + axis];
            rest /= words[11 + axis];
            inside &= at >= 0 && at < (long long)words[2 + axis];
            in += at * (axis ? words[6 + axis] : 2);
        }
        // Bits of the address from 4 on are turned by those from 7 on, as many as a row of the swizzle has pieces.
        uintptr_t place = reinterpret_cast<uintptr_t>(memory) + 2 * i;
        place ^= (place >> 7 & (swizzle / 16 - 1)) << 4;
        each(reinterpret_cast<unsigned short*>(place), inside ? reinterpret_cast<unsigned short*>(in) : nullptr);
    }
    return 2 * count;
}
inline void bring(void* to, const Map& map, Barrier& barrier, const long long (&first)[5]) {
    barrier.bytes -= box(to, map, first, [](unsigned short* place, const unsigned short* in) { *place = in ? *in : 0; });
    barrier.check();
}
inline void copy(void* to, const Map& map, Barrier& barrier, int blocks, int x, int y) {
    if (blocks != 1) { fprintf(stderr, "emulator: clusters have one block\n"); abort(); }
    bring(to, map, barrier, {x, y});
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
inline void written() {}
inline void stored() {}
inline void copy_cube(void* to, const Map& map, Barrier& barrier, int x, int y, int z) {
    bring(to, map, barrier, {x, y, z});
}
inline void copy(void* to, const Map& map, Barrier& barrier, int c, int x, int y, int image) {
    bring(to, map, barrier, {c, x, y, image});
}
inline void copy(void* to, const Map& map, Barrier& barrier, int c, int x, int y, int image, int chunk) {
    bring(to, map, barrier, {c, x, y, image, chunk});
}
inline void put(const void* from, const Map& map, const long long (&first)[5]) {
    box(from, map, first, [](const unsigned short* place, unsigned short* in) {
        if (in) *in = *place;
    });
}
inline void store(const void* from, const Map& map, int x, int y) { put(from, map, {x, y}); }
inline void store(const void* from, const Map& map, int c, int x, int y, int image) { put(from, map, {c, x, y, image}); }
inline void commit() {}
template <int Left> inline void read_but() {}
inline void sync_group(int) { emulator::wait(5); }
template <int Threads> inline void sync_first() {
    emulator::some = Threads;
    emulator::wait(4);
}
inline void cluster_arrive() {}
inline void cluster_wait() {}

}  // namespace bulk
