// common/bulk.cuh, bulk_store.cuh, bulk_ring.cuh, bulk_windows.cuh and bulk_cluster.cuh for the emulator. Blocks of a
// cluster read each other's shared memory; boxes and arrivals for another block there are none.
//
// All is as late as it may be on a GPU, so that a wait that is missing shows: a box comes when somebody waits for its
// barrier and no thread can go on without it, and until then its place is full of 0xff, which is NaN; a box that is
// stored is read when the thread that has asked for it waits for that, and no other can go on.
namespace bulk {

// What a map says, as __init__.py writes it beside the kernel's parameters: 128 bytes are too few for all of it.
struct Layout {
    unsigned char* address;
    long long sizes[5], strides[5];    // strides are bytes, the first one those of an element
    int box[5];                        // of windows: channels, pixels
    int lower[3], upper[3], steps[3];  // of windows, along each axis between channels and images
    int axes, element, swizzle, windows;
    int rounds;  // f32 to the nearest tf32, even where two are as near, as it comes
};
// The address of its Layout, and a mark that tells a map from other bytes.
struct alignas(64) Map {
    unsigned long long words[16];

    const Layout* layout(int axes, bool windows) const {
        if (words[1] != 0x70616d726f736e65ull) emulator::fail("a map is not where the kernel has it");
        const auto* found = reinterpret_cast<const Layout*>(words[0]);
        if (found->axes != axes || bool(found->windows) != windows)
            emulator::fail("a map has another number of axes than the copy, or is of the other kind");
        return found;
    }
};
struct Barrier {
    unsigned arrivals : 15, left : 15, phase : 1;
    int bytes;
    void arrive() {
        if (!left) emulator::fail("a barrier's phase has more arrivals than it waits for");
        --left;
        check();
    }
    void check() {
        if (left || bytes) return;
        left = arrivals;
        phase ^= 1;
    }
};
static_assert(sizeof(Barrier) == 8, "as in shared memory of a GPU");

// A box or a line that has been asked for.
struct Coming {
    Barrier* barrier;
    unsigned char* to;
    int bytes;
    const Layout* map;          // null: a line
    const unsigned char* line;  // from there
    int first[5], way[3];       // its first element; of windows, the first pixel's first tap, and the way to the tap
    int block = emulator::inside;  // whose barrier and place they are
};
static emulator::List<Coming> coming;

// One row of a box, at `place` as if nothing were swizzled. `in` is the tensor's row, null if there is none, of which
// the box begins with element `first`.
template <bool Stores> inline void move_row(const Layout& map, uintptr_t place, unsigned char* in, long long first) {
    const long long begin = first * map.element, end = map.sizes[0] * map.element;
    const int bytes = map.box[0] * map.element;
    for (int at = 0; at < bytes; at += 16) {
        // Bits of the address from 4 on are turned by those from 7 on, as many as a row of the swizzle has pieces.
        uintptr_t turned = place + at;
        turned ^= (turned >> 7 & (map.swizzle / 16 - 1)) << 4;
        auto* const piece = reinterpret_cast<unsigned char*>(turned);
        // Of these sixteen bytes, those that lie in the tensor.
        const long long from = min(max(-begin - at, 0ll), 16ll);
        const long long until = in ? max(min(end - begin - at, 16ll), from) : from;
        if (!Stores && until - from < 16) memset(piece, 0, 16);
        if (until > from) {
            unsigned char* const there = in + begin + at + from;
            memcpy(Stores ? there : piece + from, Stores ? piece + from : there, until - from);
        }
        if (!Stores && map.rounds)
            for (int word = 0; word < 4; ++word) {
                unsigned& bits = reinterpret_cast<unsigned*>(piece)[word];
                if ((bits & 0x7f800000u) != 0x7f800000u) bits = (bits + 0xfffu + (bits >> 13 & 1)) & 0xffffe000u;
            }
    }
}
template <bool Stores> inline void move_box(const Layout& map, const void* memory, const int (&first)[5]) {
    auto place = reinterpret_cast<uintptr_t>(memory);
    int count = 1;
    for (int axis = 1; axis < map.axes; ++axis) count *= map.box[axis];
    for (int i = 0; i < count; ++i, place += map.box[0] * map.element) {
        unsigned char* in = map.address;
        int rest = i;
        bool inside = true;
        for (int axis = 1; axis < map.axes; ++axis) {
            const long long at = (long long)first[axis] + rest % map.box[axis];
            rest /= map.box[axis];
            inside &= at >= 0 && at < map.sizes[axis];
            in += at * map.strides[axis];
        }
        move_row<Stores>(map, place, inside ? in : nullptr, first[0]);
    }
}
inline int last_place(const Layout& map, int axis) { return int(map.sizes[axis + 1]) - 1 + map.upper[axis]; }
inline void move_windows(const Layout& map, const void* memory, const int (&first)[5], const int (&way)[3]) {
    auto place = reinterpret_cast<uintptr_t>(memory);
    const int spatial = map.axes - 2;
    int at[4];
    for (int axis = 0; axis <= spatial; ++axis) at[axis] = first[axis + 1];
    for (int pixel = 0; pixel < map.box[1]; ++pixel, place += map.box[0] * map.element) {
        unsigned char* in = map.address;
        bool inside = true;
        for (int axis = 0; axis <= spatial; ++axis) {
            const long long tap = (long long)at[axis] + (axis < spatial ? way[axis] : 0);
            inside &= tap >= 0 && tap < map.sizes[axis + 1];
            in += tap * map.strides[axis + 1];
        }
        move_row<false>(map, place, inside ? in : nullptr, first[0]);
        int axis = 0;
        for (; axis < spatial; ++axis) {
            at[axis] += map.steps[axis];
            if (at[axis] <= last_place(map, axis)) break;
            at[axis] = map.lower[axis];
        }
        if (axis == spatial) ++at[spatial];
    }
}

inline void ask(const Coming& asked) {
    for (int i = 0; i < coming.count; ++i) {
        const Coming& other = coming.all[i];
        if (asked.block == other.block && asked.to < other.to + other.bytes && other.to < asked.to + asked.bytes)
            emulator::fail("two boxes come to the same place at the same time");
    }
    memset(asked.to, 0xff, asked.bytes);
    coming.add(asked);
}
// What has been asked for with this barrier, of the block inside, comes now.
inline void come(Barrier& barrier) {
    int kept = 0;
    for (int i = 0; i < coming.count; ++i) {
        const Coming& each = coming.all[i];
        if (each.barrier != &barrier || each.block != emulator::inside) {
            coming.all[kept++] = each;
            continue;
        }
        if (!each.map) memcpy(each.to, each.line, each.bytes);
        else if (each.map->windows) move_windows(*each.map, each.to, each.first, each.way);
        else move_box<false>(*each.map, each.to, each.first);
        barrier.bytes -= each.bytes;
    }
    coming.count = kept;
    barrier.check();
}
// Of all barriers that threads wait for, the one for which boxes have been asked last: who waits for other boxes alone
// goes on before those come that others wait for.
inline bool come() {
    constexpr int most = 64 * emulator::most_blocks;
    struct {
        void* barrier;
        int block;
    } waited[most];
    int count = 0;
    for (size_t i = 0; i < emulator::fibers.size(); ++i) {
        const auto& fiber = emulator::fibers[i];
        if (fiber.done || fiber.waits != 3 || count == most) continue;
        const int block = i / emulator::pitch;
        int known = 0;
        while (known < count && (waited[known].barrier != fiber.barrier || waited[known].block != block)) ++known;
        if (known == count) waited[count++] = {fiber.barrier, block};
    }
    for (int i = coming.count - 1; i >= 0; --i)
        for (int k = 0; k < count; ++k)
            if (coming.all[i].barrier == waited[k].barrier && coming.all[i].block == waited[k].block) {
                emulator::enter(waited[k].block);
                come(*coming.all[i].barrier);
                return true;
            }
    return false;
}

inline void init(Barrier& barrier, int arrivals) { barrier = {unsigned(arrivals), unsigned(arrivals), 0, 0}; }
inline void publish() {}
inline void expect(Barrier& barrier, int bytes) {
    barrier.bytes += bytes;
    if (barrier.bytes >= 1 << 20) emulator::fail("a barrier counts less than a megabyte");
    barrier.arrive();
}
inline void wait(Barrier& barrier, int parity) {
    emulator::fibers[emulator::current].barrier = &barrier;
    emulator::fibers[emulator::current].parity = parity;
    while (int(barrier.phase) == parity) emulator::wait(3);
}
inline void arrive(Barrier& barrier) { barrier.arrive(); }
inline void arrive(Barrier& barrier, int rank) {
    if (rank != emulator::inside) emulator::fail("an arrival at another block");
    barrier.arrive();
}

inline void this_block_alone(int blocks) {
    if (blocks != 1 << emulator::inside) emulator::fail("a copy for other blocks of the cluster");
}
inline void aligned_box(const void* memory) {
    if (reinterpret_cast<uintptr_t>(memory) % 128) emulator::fail("a box is not aligned");
}
template <int Axes> inline void bring(void* to, const Map& map, Barrier& barrier, const int (&first)[Axes]) {
    aligned_box(to);
    const Layout* const found = map.layout(Axes, false);
    Coming asked = {&barrier, static_cast<unsigned char*>(to), found->element, found};
    for (int i = 0; i < Axes; ++i) {
        asked.bytes *= found->box[i];
        asked.first[i] = first[i];
    }
    ask(asked);
}
inline void copy(void* to, const Map& map, Barrier& barrier, int blocks, int x, int y) {
    this_block_alone(blocks);
    bring<2>(to, map, barrier, {x, y});
}
inline void copy_cube(void* to, const Map& map, Barrier& barrier, int x, int y, int z) {
    bring<3>(to, map, barrier, {x, y, z});
}
inline void copy(void* to, const Map& map, Barrier& barrier, int c, int x, int y, int image) {
    bring<4>(to, map, barrier, {c, x, y, image});
}
inline void copy(void* to, const Map& map, Barrier& barrier, int c, int x, int y, int image, int chunk) {
    bring<5>(to, map, barrier, {c, x, y, image, chunk});
}
inline void fetch_map(const Map&) {}
inline void copy_line(void* to, const void* from, int bytes, Barrier& barrier, int blocks) {
    this_block_alone(blocks);
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16)
        emulator::fail("a piece of memory is not aligned");
    ask({&barrier, static_cast<unsigned char*>(to), bytes, nullptr, static_cast<const unsigned char*>(from)});
}

// The window of a pixel begins where the walk over the image comes by, from the lower corner on; a way has as many bits
// as an instruction has for all of them, 16, leave each.
template <int Axes>
inline void bring_windows(void* to, const Map& map, Barrier& barrier, const int (&first)[Axes],
                          const int (&way)[Axes - 2]) {
    aligned_box(to);
    const Layout* const found = map.layout(Axes, true);
    Coming asked = {&barrier, static_cast<unsigned char*>(to), found->box[0] * found->box[1] * found->element, found};
    for (int i = 0; i < Axes; ++i) asked.first[i] = first[i];
    for (int axis = 0; axis < Axes - 2; ++axis) {
        const int at = first[axis + 1], lower = found->lower[axis];
        if (at < lower || at > last_place(*found, axis) || (at - lower) % found->steps[axis])
            emulator::fail("a box of windows begins where no window does");
        if (way[axis] < 0 || way[axis] >= 1 << (Axes == 3 ? 16 : Axes == 4 ? 8 : 5))
            emulator::fail("a tap is too far from the first one");
        asked.way[axis] = way[axis];
    }
    ask(asked);
}
inline void copy_windows(void* to, const Map& map, Barrier& barrier, int c, int w, int image, int right) {
    bring_windows<3>(to, map, barrier, {c, w, image}, {right});
}
inline void copy_windows(void* to, const Map& map, Barrier& barrier, int c, int w, int h, int image, int right,
                         int down) {
    bring_windows<4>(to, map, barrier, {c, w, h, image}, {right, down});
}
inline void copy_windows(void* to, const Map& map, Barrier& barrier, int c, int w, int h, int d, int image, int right,
                         int down, int deep) {
    bring_windows<5>(to, map, barrier, {c, w, h, d, image}, {right, down, deep});
}

// A box on its way back, of the batch of its thread that `commit` ends.
struct Leaving {
    int thread, batch;
    const void* from;
    const Layout* map;
    int first[5];
};
static emulator::List<Leaving> leaving;
static int batches[emulator::most_threads];  // that each thread has ended
template <int Axes> inline void put(const void* from, const Map& map, const int (&first)[Axes]) {
    aligned_box(from);
    Leaving asked = {emulator::current, batches[emulator::current], from, map.layout(Axes, false)};
    for (int i = 0; i < Axes; ++i) asked.first[i] = first[i];
    leaving.add(asked);
}
inline void written() {}
inline void store(const void* from, const Map& map, int x, int y) { put<2>(from, map, {x, y}); }
inline void store(const void* from, const Map& map, int c, int x, int y, int image) {
    put<4>(from, map, {c, x, y, image});
}
inline void commit() { ++batches[emulator::current]; }
template <int Left> inline void read_but() {
    const int until = batches[emulator::current] - Left;
    emulator::wait(6);
    int kept = 0;
    for (int i = 0; i < leaving.count; ++i) {
        const Leaving& each = leaving.all[i];
        if (each.thread != emulator::current || each.batch >= until) leaving.all[kept++] = each;
        else move_box<true>(*each.map, each.from, each.first);
    }
    leaving.count = kept;
}
inline void stored() {
    commit();
    read_but<0>();
}

inline void sync_group(int) { emulator::wait(5); }
template <int Threads> inline void sync_first() {
    emulator::some[emulator::inside] = Threads;
    emulator::wait(4);
}

inline int cluster_rank() { return emulator::inside; }
inline void cluster_arrive() {
    emulator::Fiber& me = emulator::fibers[emulator::current];
    if (me.arrived != me.waited) emulator::fail("a thread arrives at its cluster twice and has not waited between");
    ++me.arrived;
}
inline void cluster_release() { cluster_arrive(); }
inline void cluster_wait() {
    emulator::Fiber& me = emulator::fibers[emulator::current];
    if (me.arrived == me.waited) emulator::fail("a thread waits for its cluster and has not arrived");
    ++me.waited;
    ++emulator::at_cluster;
    emulator::wait(8);
}
inline uint4 load_peer(const void* mine, int rank) {
    if (rank < 0 || rank >= emulator::blocks) emulator::fail("a cluster has no block of this rank");
    if (!emulator::running[rank]) emulator::fail("a block whose shared memory is read has ended");
    if (reinterpret_cast<uintptr_t>(mine) % 16) emulator::fail("a piece of a peer's memory is not aligned");
    uint4 value;
    memcpy(&value, emulator::place_of_peer(mine, rank), 16);
    return value;
}

inline void end_cluster() {
    if (coming.count) emulator::fail("a box that nobody waited for");
    if (leaving.count) emulator::fail("a box is stored, and nobody waited until it was read");
    memset(batches, 0, emulator::fibers.size() * sizeof batches[0]);
}

}  // namespace bulk
