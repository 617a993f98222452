// common/wgmma.cuh, wgmma_turned.cuh and wgmma_batches.cuh for the emulator. A product is computed by each thread for
// its own results, and no sooner than the thread waits for it and no other can go on: operands that are overwritten
// before, and sums that are read before, show.
namespace tensor {

inline int swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
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

// A descriptor is the address, and of an operand that lies across, from bit 48 on, the number of 16 bytes to the next
// 64 columns.
inline unsigned long long descriptor(const void* at) { return reinterpret_cast<uintptr_t>(at); }
inline unsigned long long along(unsigned long long descriptor, int bytes) { return descriptor + bytes; }
inline unsigned long long turned_descriptor(const void* at, int further) {
    if (further % 16 || further < 0 || further >= 1 << 18)
        emulator::fail("an operand's next part is not where it can be");
    return reinterpret_cast<uintptr_t>(at) | (unsigned long long)(further >> 4) << 48;
}
inline unsigned long long address_of(unsigned long long descriptor) { return descriptor << 16 >> 16; }

inline void aligned(unsigned long long at, unsigned long long to) {
    if (at % to) emulator::fail("an operand is not aligned");
}

// Four bytes, of which a product sees the first 19 bits.
struct tf32 {
    unsigned bits;
    explicit operator float() const { return __uint_as_float(bits & 0xffffe000u); }
};

// As products compute with them: floats, or integers that wrap around.
template <class V, class T> inline V value_of(const T& from) {
    if constexpr (std::is_same<T, e4m3>::value || std::is_same<T, e5m2>::value) {
        static float all[256];
        static bool known = false;
        for (int i = 0; !known && i < 256; ++i) all[i] = float(T{(unsigned char)i});
        known = true;
        return all[from.bits];
    } else if constexpr (std::is_same<V, float>::value) {
        return float(from);
    } else {
        return V(int(from));
    }
}

// The 32 bytes of a row, or column, of an operand that one product takes. The address's bits 4 to 6 are turned by bits
// 7 to 9, as the hardware does it.
inline unsigned long long turned(unsigned long long at) { return at ^ (at >> 7 & 7) << 4; }
template <class T, bool Turned, class V, int Depth>
inline void read_row(V (&to)[Depth], unsigned long long descriptor, int row) {
    static_assert(Depth * sizeof(T) == 32 && (!Turned || sizeof(T) == 2), "one product");
    if constexpr (Turned) {
        const auto at = address_of(descriptor) + row / 64 * (descriptor >> 48) * 16 + row % 64 * 2;
        for (int k = 0; k < Depth; ++k) to[k] = value_of<V>(*reinterpret_cast<const T*>(turned(at + 128 * k)));
    } else {
        constexpr int half = Depth / 2;
        for (int piece = 0; piece < 2; ++piece) {
            const auto* const from = reinterpret_cast<const T*>(turned(descriptor + row * 128 + 16 * piece));
            for (int k = 0; k < half; ++k) to[piece * half + k] = value_of<V>(from[k]);
        }
    }
}

// A product that has been asked for, of the batch of its thread that `group_commit` ends.
struct Asked {
    void (*compute)(const Asked&);
    void* d;
    unsigned long long a, b;
    int batch;
    bool adds;
    float rows[2][16];  // the first operand, if it comes from registers
};
static struct {
    emulator::List<Asked> products;
    int batches;  // that have ended
} asking[emulator::most_threads];

template <class T, bool Turned, int N, class D, class V, int Depth>
inline void multiply(const Asked& asked, const V (&a)[2][Depth]) {
    D* const d = static_cast<D*>(asked.d);
    const int t = emulator::current & 3;
    for (int i = 0; i < N; i += i % 2 ? 3 : 1) {  // a column of two results
        V b[Depth];
        read_row<T, Turned>(b, asked.b, i / 4 * 8 + 2 * t + i % 2);
        for (int half = 0; half < 2; ++half) {
            V sum = 0;
            for (int k = 0; k < Depth; ++k) sum += a[half][k] * b[k];
            D& to = d[i + 2 * half];
            to = asked.adds ? D(V(to) + sum) : D(sum);
        }
    }
}
template <class First, class Second, bool TurnedA, bool TurnedB, class D, int N>
inline void compute(const Asked& asked) {
    static_assert(sizeof(First) == sizeof(Second), "of one depth");
    using V = typename std::conditional<std::is_same<D, float>::value, float, unsigned>::type;
    V a[2][32 / sizeof(First)];
    const int row = emulator::current % 128 / 32 * 16 + (emulator::current & 31) / 4;
    for (int half = 0; half < 2; ++half) read_row<First, TurnedA>(a[half], asked.a, row + 8 * half);
    multiply<Second, TurnedB, N, D>(asked, a);
}
template <class T, bool Turned, int N> inline void compute_from_registers(const Asked& asked) {
    multiply<T, Turned, N, float>(asked, asked.rows);
}

template <int N> inline void compute_tf32_from_registers(const Asked& asked) {
    float rows[2][8];
    for (int half = 0; half < 2; ++half) memcpy(rows[half], asked.rows[half], sizeof rows[half]);
    multiply<tf32, false, N, float>(asked, rows);
}

inline void ask(Asked asked) {
    asked.batch = asking[emulator::current].batches;
    asking[emulator::current].products.add(asked);
}
inline void group_begin() {}
inline void group_commit() { ++asking[emulator::current].batches; }
// All threads of a warpgroup return together: one of them may say for all that operands are read.
inline void compute_but(int left) {
    auto& products = asking[emulator::current].products;
    const int until = asking[emulator::current].batches - left;
    emulator::wait(6);
    int done = 0;
    for (; done < products.count && products.all[done].batch < until; ++done)
        products.all[done].compute(products.all[done]);
    products.count -= done;
    memmove(products.all, products.all + done, products.count * sizeof(Asked));
    emulator::wait(7);
}
template <int Left> inline void group_left() { compute_but(Left); }
template <int Left, int N> inline void group_wait(float (&)[N]) { compute_but(Left); }
template <class D, int N> inline void group_done(D (&)[N]) {}
inline void end_cluster() {
    for (size_t i = 0; i < emulator::fibers.size(); ++i) {
        auto& each = asking[i];
        if (each.products.count) emulator::fail("products that nobody waited for");
        each.batches = 0;
    }
}

// The operands of wgmma.py's products begin with whole patterns of the swizzle.
template <bool Turned> inline void aligned_operand(unsigned long long at) {
    if constexpr (Turned) aligned(address_of(at), 1024);
    else aligned(at & ~0x60ull, 1024);
}
template <class T, bool Turned, int N>
inline void ask_product(float (&d)[N], unsigned long long a, unsigned long long b) {
    aligned_operand<false>(a);
    aligned_operand<Turned>(b);
    ask({compute<T, T, false, Turned, float, N>, d, a, b, 0, true});
}
// The first operand in registers: lane l has row l / 4 and the one eight below it, columns 2 * (l % 4) and the next,
// and the same eight further. Lanes must be at the same place to read each other's, so that they do it here.
template <class T, bool Turned, int N>
inline void ask_product(float (&d)[N], const unsigned (&a)[4], unsigned long long b) {
    aligned_operand<Turned>(b);
    Asked asked = {compute_from_registers<T, Turned, N>, d, 0, b, 0, true};
    const int g = (emulator::current & 31) / 4;
    for (int i = 0; i < 4; ++i)
        for (int from = 0; from < 4; ++from) {
            const unsigned word = emulator::shuffle(a[i], 4 * g + from);
            T pair[2];
            memcpy(pair, &word, 4);
            for (int j = 0; j < 2; ++j) asked.rows[i % 2][i / 2 * 8 + 2 * from + j] = float(pair[j]);
        }
    ask(asked);
}
template <class T, int N, class A>
inline void emulated_group_product(float (&d)[N], const A& a, unsigned long long b) {
    ask_product<T, false>(d, a, b);
}
template <class T, int N, class A>
inline void emulated_turned_product(float (&d)[N], const A& a, unsigned long long b) {
    ask_product<T, true>(d, a, b);
}

// Those of group_product.py: the first operand in registers, four bytes each.
template <int N>
inline void emulated_register_product(float (&d)[N], const unsigned (&a)[4], unsigned long long b, int adds) {
    aligned(b, 16);
    Asked asked = {compute_tf32_from_registers<N>, d, 0, b, 0, adds != 0};
    const int g = (emulator::current & 31) / 4;
    for (int i = 0; i < 4; ++i)
        for (int from = 0; from < 4; ++from)
            asked.rows[i % 2][i / 2 * 4 + from] = float(tf32{(unsigned)emulator::shuffle(a[i], 4 * g + from)});
    ask(asked);
}
// Both in shared memory. Rows of its second operand may begin anywhere in a pattern, as those of a window do.
template <class First, class Second, bool TurnedA, bool TurnedB, class D, int N>
inline void emulated_product(D (&d)[N], unsigned long long a, unsigned long long b, int adds) {
    aligned_operand<TurnedA>(a);
    if constexpr (TurnedB) aligned_operand<true>(b);
    else aligned(b, 16);
    ask({compute<First, Second, TurnedA, TurnedB, D, N>, d, a, b, 0, adds != 0});
}

}  // namespace tensor
