// What the implicit GEMMs share: operands as tiles in shared memory, and the products of a warp on them.
//
//     D[m, n] += sum over k of  A[m, k] * B[n, k]
//
// A tile holds a step of the depth k of one operand, in pieces of 16 bytes. Along the depth (`KMajor`) a row is one m
// or n and its pieces follow the depth; across it, a row is one k and its pieces follow m or n, as they lie in memory
// where channels are what a result has and not what it sums over. ldmatrix turns those around on the way into registers
// if they have two bytes; f32 is read value by value.
//
// Eight rows below each other are read at once. Piece j of a row lies at j ^ (row % 8) of it, so that these eight fall
// into different banks; where a row has fewer than eight pieces, rows that share 128 bytes share the exchange. Values
// of f32 across the depth are read from four rows and two pieces side by side: these lie at j ^ (2 * row % 8).
#pragma once
#include "common/mma_types.cuh"
#include "common/store_matrices.cuh"

namespace igemm {

template <bool Which, class Yes, class No>
struct If {
    using type = Yes;
};
template <class Yes, class No>
struct If<false, Yes, No> {
    using type = No;
};

constexpr int piece_bytes = 16;

template <class T, int Size, int Depth, bool KMajor>
struct Tile {
    static constexpr int per_piece = piece_bytes / sizeof(T);
    static constexpr int rows = KMajor ? Size : Depth, pieces = (KMajor ? Depth : Size) / per_piece;
    static constexpr int bytes = rows * pieces * piece_bytes;
    static_assert(pieces == 2 || pieces == 4 || pieces % 8 == 0, "rows share or divide 128 bytes");
    static constexpr bool by_value = !KMajor && sizeof(T) == 4;
    static constexpr int slice_rows = 32 / sizeof(T);  // across the depth
    static_assert(KMajor || sizeof(T) == 2 || pieces % 8 == 0,
                  "two bytes for ldmatrix, or four in whole rows of banks");

    static constexpr int together = pieces < 8 ? pieces : 8, shared = 8 / together, row_bytes = pieces * piece_bytes;

    __device__ static __forceinline__ int place(int row, int piece) {
        return row * row_bytes + (piece ^ (by_value ? 2 * row % 8 : row / shared % together)) * piece_bytes;
    }
    // The same `Down` rows further. Eight of them further, pieces are exchanged alike.
    template <int Down>
    __device__ static __forceinline__ int place(int row, int piece, int times) {
        return Down % 8 == 0 ? place(row, piece) + times * (Down * row_bytes) : place(row + times * Down, piece);
    }

    // Where a lane's values are if they are read one by one: of m or n `first` (a multiple of 16) + lane / 4, of depth
    // lane % 4 of a slice, in the first or second eight (`half`) of sixteens with even and odd numbers. The exchange of
    // pieces depends on the lane; all else is a constant: two sixteens further are 128 bytes, four depths four rows.
    struct Values {
        int at[2][2];

        __device__ __forceinline__ void place(int first, int lane) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int mn = first + lane / 4 + i / 2 * 16 + i % 2 * 8;
                at[i / 2][i % 2] = Tile::place(lane % 4, mn / 4) + mn % 4 * 4;
            }
        }
        __device__ __forceinline__ u32 operator()(const char* tile, int slice, int sixteen, int half, int down) const {
            return *reinterpret_cast<const u32*>(tile + at[sixteen % 2][half] + sixteen / 2 * 128 +
                                                 (slice * slice_rows + down * 4) * row_bytes);
        }
    };
    struct Nothing {
        __device__ __forceinline__ void place(int, int) {}
    };

    // Sixteen m, of which the first is a multiple of 16, by 32 bytes of depth: the four registers of A in
    // common/mma.cuh.
    __device__ static __forceinline__ void load_a(u32 (&to)[4], const char* tile, int m, int slice, int lane) {
        if constexpr (KMajor)
            tensor::load_matrices(to, tile + m * row_bytes + place(lane % 16, 2 * slice + lane / 16));
        else
            tensor::load_transposed(
                to, tile + slice * (16 * row_bytes) + place(lane / 16 * 8 + lane % 8, m / 8 + lane / 8 % 2));
    }

    // Sixteen n by 32 bytes of depth: the two registers of B for the first eight, then for the others.
    __device__ static __forceinline__ void load_b(u32 (&to)[4], const char* tile, int n, int slice, int lane) {
        if constexpr (KMajor)
            tensor::load_matrices(to, tile + n * row_bytes + place(lane / 16 * 8 + lane % 8, 2 * slice + lane / 8 % 2));
        else
            tensor::load_transposed(to, tile + slice * (16 * row_bytes) + place(lane % 16, n / 8 + lane / 16));
    }
};

// Where values lie in shared memory: in rows of `Pitch`, or as boxes of `Count` rows by 64 values of two bytes come, in
// whose rows of 128 bytes pieces of 16 are swizzled. Eight rows further, the same column is `eight_rows` further.
// `matrices`: warps read and store them as matrices, 16 x 16 values at once.
template <int Pitch>
struct Pitched {
    static constexpr int eight_rows = 8 * Pitch;
    static constexpr bool matrices = false;
    __device__ static __forceinline__ int at(int row, int column) { return row * Pitch + column; }
};
template <int Count>
struct Boxed {
    static constexpr int eight_rows = 8 * 64;
    static constexpr bool matrices = true;
    __device__ static __forceinline__ int at(int row, int column) {
        return (column >> 6) * (Count * 64) + row * 64 + ((column & 63) ^ (row & 7) << 3);
    }
};

// What `store` of sums reads besides where that is nothing.
struct Nothing {
    __device__ __forceinline__ int column(int) const { return 0; }
    __device__ __forceinline__ int place(int) const { return 0; }
};

// A float as the nearest tf32 and what that leaves out, of which tensor cores take 11 bits; together they have 23. What
// is not finite, or so large that it is rounded to what is not, leaves out what is no number. As `round_tf32`, which
// takes twice as many instructions to keep every NaN one.
struct Tf32 {
    u32 high, low;

    __device__ __forceinline__ explicit Tf32(u32 bits)
        : high((bits + 0x1000u) & 0xffffe000u), low(__float_as_uint(__uint_as_float(bits) - __uint_as_float(high))) {}
};

// The same for any float: what is rounded to infinity is cut off instead, and what is not finite leaves nothing out. It
// is not multiplied with what another value leaves out: `finite` is 0 then, and else as `high`.
struct AnyTf32 {
    u32 high, low, finite;

    __device__ __forceinline__ explicit AnyTf32(u32 bits) : high(tensor::round_tf32(bits)) {
        if ((high & 0x7f800000u) == 0x7f800000u) high = bits & 0xffffe000u;
        const bool number = (high & 0x7f800000u) != 0x7f800000u;
        const float rest = __uint_as_float(bits) - __uint_as_float(high);
        low = number ? __float_as_uint(rest) : 0;
        finite = number ? high : 0;
    }
};

// The same number, but the compiler does not know: where registers are few, it is to work out anew what it knows already
// of that number, rather than keep it. threadIdx.y is 0.
__device__ __forceinline__ int hidden(int number) {
    int zero = 0;
#if defined(__CUDACC__)
    asm volatile("mov.u32 %0, %%tid.y;" : "=r"(zero));
#endif
    return number + zero;
}

// The products of one warp of a block that has `WarpsM` along m: MT * 16 by NT * 16 results, from (m, n) on. Of f32,
// `Parts` is how many products of tf32 stand for one: 1, or 3, which leave out only the product of both small parts.
//
// Tensor cores cut off what a sum has no bits for, always towards zero. Products in three parts are as exact as f32, so
// their sums have to be: those of two slices begin at zero, and are added to what is there by an addition that rounds.
// Factors that are not finite make such sums NaN; then all are computed anew with `Any`, which takes care of every
// factor and leaves the sums of finite factors as they are, to the bit.
template <class T, class A, class B, int MT, int NT, int WarpsM, class Sum, int Parts = 1, bool Any = false>
struct Warp {
    static constexpr int rows = MT;
    static constexpr bool rounds = sizeof(T) == 4;
    template <class Tile>
    using ValuesOf = typename If<Tile::by_value, typename Tile::Values, typename Tile::Nothing>::type;

    Sum sum[MT][2 * NT][4];
    Sum part[MT][2 * NT][4];    // of two slices, where products have three parts
    u32 a[MT][4], b[2][NT][4];  // operands of a slice, 32 bytes of the depth; of B also those of the next one
    u32 b_low[NT][4], b_finite[NT][4];
    int m, n, lane;
    ValuesOf<A> a_values;
    ValuesOf<B> b_values;

    __device__ __forceinline__ explicit Warp(int thread) {
        place(thread);
#pragma unroll
        for (int i = 0; i < MT * NT * 8; ++i) sum[i / (8 * NT)][i / 4 % (2 * NT)][i % 4] = 0;
    }

    __device__ __forceinline__ void place(int thread) {
        m = thread / 32 % WarpsM * (16 * MT);
        n = thread / 32 / WarpsM * (16 * NT);
        lane = thread % 32;
        a_values.place(m, lane);
        b_values.place(n, lane);
    }

    __device__ __forceinline__ void read_a(const char* tiles, int slice, int row) {
        if constexpr (A::by_value)
#pragma unroll
            for (int i = 0; i < 4; ++i) a[row][i] = a_values(tiles, slice, row, i % 2, i / 2);
        else
            A::load_a(a[row], tiles, m + 16 * row, slice, lane);
    }
    __device__ __forceinline__ void read_b(const char* tiles, int slice) {
        tiles += A::bytes;
#pragma unroll
        for (int j = 0; j < NT; ++j)
            if constexpr (B::by_value)
#pragma unroll
                for (int i = 0; i < 4; ++i) b[slice % 2][j][i] = b_values(tiles, slice, j, i / 2, i % 2);
            else
                B::load_b(b[slice % 2][j], tiles, n + 16 * j, slice, lane);
    }
    __device__ __forceinline__ void multiply(int slice, int row) {
        u32(&left)[4] = a[row];
        u32 low[4], finite[4];
        if constexpr (rounds) {
#pragma unroll
            for (int i = 0; i < 4; ++i) round(left[i], low[i], finite[i]);
            if (row == 0)
#pragma unroll
                for (int j = 0; j < 4 * NT; ++j)
                    round(b[slice % 2][j / 4][j % 4], b_low[j / 4][j % 4], b_finite[j / 4][j % 4]);
        }
        const u32(&right)[NT][4] = b[slice % 2];
#pragma unroll
        for (int j = 0; j < 2 * NT; ++j) {
            if constexpr (Parts == 3) {  // the small ones first
                Sum(&to)[4] = part[row][j];
#pragma unroll
                for (int i = 0; i < 4; ++i) to[i] = slice % 2 ? to[i] : 0;
                multiply(to, low, b_finite, j);
                multiply(to, finite, b_low, j);
                multiply(to, left, right, j);
                if (slice % 2)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[row][j][i] += to[i];
            } else {
                multiply(sum[row][j], left, right, j);
            }
        }
    }

    // Whether a sum is no number.
    __device__ __forceinline__ bool is_nan() const {
        bool found = false;
#pragma unroll
        for (int i = 0; i < MT * NT * 8; ++i) {
            const Sum each = sum[i / (8 * NT)][i / 4 % (2 * NT)][i % 4];
            found |= each != each;
        }
        return found;
    }
    template <class Other>
    __device__ __forceinline__ void take(const Other& other) {
#pragma unroll
        for (int i = 0; i < MT * NT * 8; ++i)
            sum[i / (8 * NT)][i / 4 % (2 * NT)][i % 4] = other.sum[i / (8 * NT)][i / 4 % (2 * NT)][i % 4];
    }

    // The sums as rows in shared memory, or as columns (`Turned`), which lie there as `Lie` says. `change` makes two
    // that lie side by side in a row into what is stored, told what `besides` reads for their columns and for them.
    // Where that is shared memory, the compiler cannot tell it from what is stored: columns are read once for all rows,
    // and a row's before the first of it is stored.
    template <bool Turned, class Lie, class Value, class Besides, class Change>
    __device__ __forceinline__ void store(Value* to, const Besides& besides, const Change& change) const {
        if constexpr (Lie::matrices) {
            store_matrices<Lie>(to, besides, change);
            return;
        }
        const int g = lane / 4, t = lane % 4;
        decltype(besides.column(0)) columns[2 * NT];
        int first[2 * NT];  // of a column: where its first row is
#pragma unroll
        for (int j = 0; j < 2 * NT; ++j) {
            columns[j] = besides.column(n + 8 * j + 2 * t);
            first[j] = Lie::at(m + g, n + 8 * j + 2 * t);
        }
#pragma unroll
        for (int i = 0; i < 2 * MT; ++i) {
            decltype(besides.place(0)) places[2 * NT];
#pragma unroll
            for (int j = 0; j < 2 * NT; ++j) places[j] = besides.place(first[j] + i * Lie::eight_rows);
#pragma unroll
            for (int j = 0; j < 2 * NT; ++j) {
                const Sum pair[2] = {sum[i / 2][j][i % 2 * 2], sum[i / 2][j][i % 2 * 2 + 1]};
                const Pack<Value, 2> changed = change(pair, columns[j], places[j]);
                if constexpr (Turned) {
                    const int row = m + 8 * i + g, column = n + 8 * j + 2 * t;
                    to[Lie::at(column, row)] = changed.value[0];
                    to[Lie::at(column + 1, row)] = changed.value[1];
                } else {
                    ::store(to + first[j] + i * Lie::eight_rows, changed);
                }
            }
        }
    }

  private:
    // The same for values of two bytes in rows, 16 x 16 of them by one instruction.
    template <class Lie, class Value, class Besides, class Change>
    __device__ __forceinline__ void store_matrices(Value* to, const Besides& besides, const Change& change) const {
        decltype(besides.column(0)) columns[2 * NT];
        int first[NT];
#pragma unroll
        for (int j = 0; j < 2 * NT; ++j) columns[j] = besides.column(n + 8 * j + lane % 4 * 2);
#pragma unroll
        for (int j = 0; j < NT; ++j) first[j] = Lie::at(m + lane % 16, n + 16 * j + lane / 16 * 8);
#pragma unroll
        for (int i = 0; i < MT; ++i) {
            u32 places[NT][4];
#pragma unroll
            for (int j = 0; j < NT; ++j) besides.places(places[j], first[j] + 2 * i * Lie::eight_rows);
#pragma unroll
            for (int j = 0; j < NT; ++j) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const Sum(&four)[4] = sum[i][2 * j + k / 2];
                    const Sum pair[2] = {four[k % 2 * 2], four[k % 2 * 2 + 1]};
                    const auto held = *reinterpret_cast<const Pack<Value, 2>*>(&places[j][k]);
                    const Pack<Value, 2> changed = change(pair, columns[2 * j + k / 2], held);
                    places[j][k] = *reinterpret_cast<const u32*>(&changed);
                }
                tensor::store_matrices(to + first[j] + 2 * i * Lie::eight_rows, places[j]);
            }
        }
    }

    __device__ static __forceinline__ void multiply(Sum (&to)[4], const u32 (&left)[4], const u32 (&right)[NT][4],
                                                    int j) {
        tensor::mma<T>(to, left[0], left[1], left[2], left[3], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
    }

    __device__ static __forceinline__ void round(u32& value, u32& low, u32& finite) {
        if constexpr (Parts == 1) {
            value = tensor::round_tf32(value);
        } else if constexpr (Any) {
            const AnyTf32 parts(value);
            value = parts.high;
            low = parts.low;
            finite = parts.finite;
        } else {
            const Tf32 parts(value);
            value = finite = parts.high;
            low = parts.low;
        }
    }
};

// Rows of `Columns` values leave shared memory as vectors of V. A thread keeps to a column, or to some where there are
// more than threads, or is not needed. It reads four rows of it before it hands them to
// `take.rows(row, apart, column, vectors)`.
template <class Lie, int Rows, int Columns, int V, int Threads, class Value, class Take>
__device__ __forceinline__ void leave(const Value* from, const Take& take) {
    constexpr int turns = (Columns / V + Threads - 1) / Threads, across = Columns / V / turns;
    constexpr int apart = Threads / across, passes = (Rows + apart - 1) / apart;
    constexpr int together = passes % 4 == 0 ? 4 : passes % 2 == 0 ? 2 : 1;
    static_assert(across * turns * V == Columns, "threads share the columns evenly");
    const int first = threadIdx.x / across;
    if (Threads % across && first >= apart) return;
#pragma unroll 1
    for (int pass = 0; pass < passes * turns; pass += together) {
        const int row = first + pass % passes * apart, column = (threadIdx.x % across + pass / passes * across) * V;
        Pack<Value, V> held[together];
#pragma unroll
        for (int i = 0; i < together; ++i)
            if (Rows % apart == 0 || row + i * apart < Rows) held[i] = load<V>(from + Lie::at(row + i * apart, column));
        take.template rows<together>(row, apart, column, held);
    }
}

// All steps of a block, each `Slices` slices long, of which `Stages` - 1 are asked for ahead.
//
// `copies` knows what a thread brings of a step: `Copies::count` pieces, each of which it looks up (`from`) and asks
// for (`copy`) a few products later; `end` goes on to the next step, or to nothing behind the last of them. Before
// that, with a barrier in between, all threads `prepare` what they share of a step, if `Copies::prepares`. If
// `Copies::changes`, a thread may `change` what it brought of a step, once that is there and before others see it; as
// many steps are asked for by then, that one included, as `change` is told.
//
// If `Copies::drains`, the last steps have a loop of their own, in which nothing is asked for: less than two thirds of
// the instructions. In front of it, what is needed behind all steps is asked for (`bring_more`), if
// `Copies::brings_more`: earlier, steps wait for it; from within a loop, the loop takes longer. It is part of the
// asynchronous copies that steps are waited for with, if `Copies::copies_more`. If registers are `Copies::scarce`,
// threads work out anew what they read in that loop.
//
// A warp goes through the rows of a slice. Behind a row's products it reads what that row multiplies in the next slice,
// so that reading and multiplying alternate. Copies come in batches: ptxas puts three idle reads before each that
// follows a read of shared memory. A thread needs registers for the places of a batch. The last slice has a barrier in
// its middle: the next step's tiles are there for all, and this step's are no longer read.
template <int Stages, int Slices, class Products, class Copies>
__device__ __forceinline__ void steps(Products& products, Copies& copies, char* ring, int stage_bytes, int count) {
    static_assert(Slices % 2 == 0, "operands alternate between two sets of registers, from step to step as well");
    constexpr int rows = Products::rows, turn = rows / 2, slots = (Slices - 1) * rows;
    constexpr int batches = Copies::batches < slots ? Copies::batches : slots;
#pragma unroll 1
    for (int step = 0; step < Stages - 1; ++step) {
        if constexpr (Copies::prepares) {
            copies.prepare(step);
            __syncthreads();
        }
#pragma unroll
        for (int first = 0; first < Copies::count; first += 4) {
            typename Copies::Place from[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (first + i < Copies::count) from[i] = copies.from(first + i);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (first + i < Copies::count) copies.copy(ring + step * stage_bytes, first + i, from[i]);
        }
        copies.end();
        tensor::commit();
    }
    if constexpr (Copies::prepares) copies.prepare(Stages - 1);
    tensor::wait<Stages - 2>();
    if constexpr (Copies::changes) copies.template change<Stages - 1>(ring);
    __syncthreads();
    products.read_b(ring, 0);
#pragma unroll
    for (int row = 0; row < rows; ++row) products.read_a(ring, 0, row);

    int reading = 0, writing = Stages - 1, step = 0;
    constexpr int parts = Copies::drains ? 2 : 1;
#pragma unroll
    for (int part = 0; part < parts; ++part) {
        const bool drain = part == 1;
        const int until = part == parts - 1 ? count : count - (Stages - 1);
        if constexpr (Copies::brings_more)
            if (drain) copies.bring_more(ring);
        if constexpr (Copies::copies_more)
            if (drain) tensor::commit();
        if (drain && Copies::scarce) products.place(hidden(threadIdx.x));
#pragma unroll 1
        for (; step < until; ++step) {
            const char* const tiles = ring + reading * stage_bytes;
            reading = reading + 1 == Stages ? 0 : reading + 1;
            const char* const next = ring + reading * stage_bytes;
            char* const to = ring + writing * stage_bytes;
            writing = writing + 1 == Stages ? 0 : writing + 1;
            if constexpr (Copies::prepares)
                if (!drain) copies.prepare(step + Stages);
#pragma unroll
            for (int slice = 0; slice < Slices; ++slice) {
                const bool last = slice == Slices - 1;
                if (!last) products.read_b(tiles, slice + 1);
#pragma unroll
                for (int row = 0; row < rows; ++row) {
                    const int slot = slice * rows + row;
                    const bool copying = !drain && slot < slots && slot * batches % slots < batches;
                    const int batch = copying ? slot * batches / slots : -1;
                    typename Copies::Place from[Copies::count];
#pragma unroll
                    for (int i = 0; i < Copies::count; ++i)
                        if (i * batches / Copies::count == batch) from[i] = copies.from(i);
                    if (last && row == turn) {
                        if (!drain || Copies::changes) copies.end();
                        if (drain && Copies::copies_more) {
                            tensor::wait<1>();
                        } else {
                            tensor::commit();
                            tensor::wait<Stages - 2>();
                        }
                        if constexpr (Copies::changes) copies.template change<Stages - 1>(ring + reading * stage_bytes);
                        __syncthreads();
                        products.read_b(next, 0);
#pragma unroll
                        for (int before = 0; before < turn; ++before) products.read_a(next, 0, before);
                    }
                    products.multiply(slice, row);
                    if (!last) products.read_a(tiles, slice + 1, row);
                    if (last && row >= turn) products.read_a(next, 0, row);
#pragma unroll
                    for (int i = 0; i < Copies::count; ++i)
                        if (i * batches / Copies::count == batch) copies.copy(to, i, from[i]);
                }
            }
        }
    }
    tensor::wait<0>();
    __syncthreads();
}

// The same one step after the other, for what is seldom: little code, and nothing is asked for ahead.
template <int Slices, class Products, class Copies>
__device__ __forceinline__ void plain_steps(Products& products, Copies& copies, char* ring, int count) {
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
        if constexpr (Copies::prepares) {
            copies.prepare(step);
            __syncthreads();
        }
#pragma unroll 1
        for (int i = 0; i < Copies::count; ++i) copies.copy(ring, i, copies.from(i));
        copies.end();
        tensor::commit();
        tensor::wait<0>();
        if constexpr (Copies::changes) copies.template change<1>(ring);
        __syncthreads();
#pragma unroll
        for (int slice = 0; slice < Slices; ++slice) {
            products.read_b(ring, slice);
#pragma unroll
            for (int row = 0; row < Products::rows; ++row) {
                products.read_a(ring, slice, row);
                products.multiply(slice, row);
            }
        }
        __syncthreads();
    }
}

// Products in three parts once more, with care for factors that are not finite, if a sum is no number. `again` makes
// the copies anew.
template <int Slices, class Any, class Products, class Again>
__device__ __forceinline__ void mend(Products& products, char* ring, int count, const Again& again) {
    __shared__ int any;
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    if (products.is_nan()) any = 1;
    __syncthreads();
    if (!any) return;
    Any exact(threadIdx.x);
    auto copies = again();
    plain_steps<Slices>(exact, copies, ring, count);
    products.take(exact);
}

// `Count` elements from global to shared memory, as a copy that runs beside the threads where it can be one; zeros
// unless `inside`.
template <int Count, class T>
__device__ __forceinline__ void bring(void* to, const T* from, bool inside) {
    constexpr int size = Count * sizeof(T);
    if constexpr (size == 8) {
        tensor::copy_eight(to, from, inside);
    } else if constexpr (size >= 4) {
        tensor::copy<size>(to, from, inside);
    } else {
        Pack<T, Count> held;  // of a list with fewer values than it has, NVRTC leaves the others as they are
#pragma unroll
        for (int i = 0; i < Count; ++i) held.value[i] = T{};
        if (inside) held = load<Count>(from);
        *static_cast<Pack<T, Count>*>(to) = held;
    }
}

// The same into registers: what is less than four bytes is no such copy.
template <int Count, class T>
__device__ __forceinline__ void fetch(T* to, const T* from, bool inside) {
    Pack<T, Count> held;
#pragma unroll
    for (int i = 0; i < Count; ++i) held.value[i] = T{};
    if (inside) held = load<Count>(from);
#pragma unroll
    for (int i = 0; i < Count; ++i) to[i] = held.value[i];
}

// Asks for the 32 bytes at an address to come to the L2 cache.
__device__ __forceinline__ void ask(const void* at) {
#if defined(__CUDACC__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

// N values of a prologue's vector, f32, from a multiple of N on.
template <int N, class Sum>
__device__ __forceinline__ void read_vector(Sum (&value)[N], const void* vector, int first) {
    constexpr int together = N < 4 ? N : 4;
#pragma unroll
    for (int i = 0; i < N; i += together) {
        const auto some = load<together>(static_cast<const float*>(vector) + (first + i));
#pragma unroll
        for (int k = 0; k < together; ++k) value[i + k] = some.value[k];
    }
}

// N elements in shared memory, replaced by what a prologue makes of them if they are `inside` of the image; others are
// zeros and stay so. Without a branch, so that the next ones can be read before these are written.
template <class T, class Sum, int N, template <int> class Vectors>
__device__ __forceinline__ void change(char* at, const Vectors<N>& vectors, bool inside) {
    T* const place = reinterpret_cast<T*>(at);
    Pack<T, N> held = load<N>(place);
    Sum value[N];
#pragma unroll
    for (int k = 0; k < N; ++k) value[k] = Sum(held.value[k]);
    vectors.apply(value);
#pragma unroll
    for (int k = 0; k < N; ++k) held.value[k] = T(inside ? value[k] : Sum(0));
    store(place, held);
}

}  // namespace igemm
