// common/mma.cuh and common/mma_types.cuh for the emulator: what a warp computes together goes through a buffer with one entry for each thread.
namespace tensor {

using u32 = unsigned;

struct Fragment {
    u32 a[4], b[2];
    const void* row;
};
inline Fragment* fragments() {
    static Fragment all[emulator::most_threads];
    return all;
}

// Element `half` of a register that holds two values of type T.
template <class T> inline float element(u32 word, int half) {
    T value;
    value.bits = (unsigned short)(half ? word >> 16 : word);
    return float(value);
}

template <class T> inline void product(float (&d)[4], const Fragment& mine, int depth) {
    const int me = emulator::current, first = me & ~31, g = (me & 31) / 4, t = me & 3;
    fragments()[me] = mine;
    emulator::wait(2);
    for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        float sum = 0;
        for (int k = 0; k < depth; ++k) {
            const Fragment& a = fragments()[first + row % 8 * 4 + k % 8 / 2];
            const Fragment& b = fragments()[first + column * 4 + k % 8 / 2];
            sum += element<T>(a.a[row / 8 + k / 8 * 2], k & 1) * element<T>(b.b[k / 8], k & 1);
        }
        d[i] += sum;
    }
    emulator::wait(2);
}

// Floats of one byte, as common/mma_types.cuh has them.
template <int Exponent, int Mantissa, bool Infinite> struct Small {
    unsigned char bits;
    operator float() const {
        const int mantissa = bits & ((1 << Mantissa) - 1), exponent = bits >> Mantissa & ((1 << Exponent) - 1);
        const float sign = bits & 128 ? -1.0f : 1.0f;
        if (exponent == (1 << Exponent) - 1 && (Infinite || mantissa == (1 << Mantissa) - 1))
            return Infinite && mantissa == 0 ? sign * INFINITY : NAN;
        const int from = exponent ? exponent : 1;
        return sign * ldexpf(float(mantissa + (exponent ? 1 << Mantissa : 0)), from - (1 << (Exponent - 1)) + 1 - Mantissa);
    }
};
using e4m3 = Small<4, 3, false>;
using e5m2 = Small<5, 2, true>;
template <class Left, class Right> struct Bytes { unsigned char bits; };

template <class Left, class Right> inline void product_bytes(Bytes<Left, Right>*, float (&d)[4], const Fragment& mine) {
    const int me = emulator::current, first = me & ~31, g = (me & 31) / 4, t = me & 3;
    fragments()[me] = mine;
    emulator::wait(2);
    for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        float sum = 0;
        for (int k = 0; k < 32; ++k) {
            const u32 a = fragments()[first + row % 8 * 4 + k % 16 / 4].a[row / 8 + k / 16 * 2];
            const u32 b = fragments()[first + column * 4 + k % 16 / 4].b[k / 16];
            sum += float(Left{(unsigned char)(a >> k % 4 * 8)}) * float(Right{(unsigned char)(b >> k % 4 * 8)});
        }
        d[i] += sum;
    }
    emulator::wait(2);
}

// Products of f32 see the first 19 bits of each factor, and lie otherwise.
inline void product_tf32(float (&d)[4], const Fragment& mine) {
    const int me = emulator::current, first = me & ~31, g = (me & 31) / 4, t = me & 3;
    const auto value = [](u32 word) {
        word &= 0xffffe000u;
        float found;
        memcpy(&found, &word, 4);
        return found;
    };
    fragments()[me] = mine;
    emulator::wait(2);
    for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        float sum = 0;
        for (int k = 0; k < 8; ++k)
            sum += value(fragments()[first + row % 8 * 4 + k % 4].a[row / 8 + k / 4 * 2]) *
                   value(fragments()[first + column * 4 + k % 4].b[k / 4]);
        d[i] += sum;
    }
    emulator::wait(2);
}
inline u32 round_tf32(u32 bits) {
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u;
}

template <class T> inline void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (sizeof(T) == 4) return product_tf32(d, {{a0, a1, a2, a3}, {b0, b1}, nullptr});
    else if constexpr (sizeof(T) == 1) return product_bytes((T*)nullptr, d, {{a0, a1, a2, a3}, {b0, b1}, nullptr});
    else
    product<T>(d, {{a0, a1, a2, a3}, {b0, b1}, nullptr}, 16);
}
template <class T> inline void mma(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const int me = emulator::current, first = me & ~31, g = (me & 31) / 4, t = me & 3;
    const auto value = [](u32 word, int at) { return int((signed char)(word >> 8 * at)); };
    fragments()[me] = {{a0, a1, a2, a3}, {b0, b1}, nullptr};
    emulator::wait(2);
    for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        u32 sum = d[i];  // wraps around
        for (int k = 0; k < 32; ++k)
            sum += value(fragments()[first + row % 8 * 4 + k % 16 / 4].a[row / 8 + k / 16 * 2], k % 4) *
                   value(fragments()[first + column * 4 + k % 16 / 4].b[k / 16], k % 4);
        d[i] = int(sum);
    }
    emulator::wait(2);
}
template <class T> inline void mma(float (&d)[4], u32 a0, u32 a1, u32 b0) {
    product<T>(d, {{a0, a1, 0, 0}, {b0, 0}, nullptr}, 8);
}

template <int Count> inline void matrices(u32 (&to)[Count], const void* row, bool transposed) {
    const int me = emulator::current, first = me & ~31, g = (me & 31) / 4, t = me & 3;
    if ((me & 31) < 8 * Count && reinterpret_cast<uintptr_t>(row) % 16) { fprintf(stderr, "emulator: a matrix row is not aligned\n"); abort(); }
    fragments()[me].row = row;
    emulator::wait(2);
    for (int i = 0; i < Count; ++i) {
        const auto at = [&](int r, int c) {
            return u32(static_cast<const unsigned short*>(fragments()[first + 8 * i + r].row)[c]);
        };
        to[i] = transposed ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
    }
    emulator::wait(2);
}
template <int Count> inline void load_matrices(u32 (&to)[Count], const void* row) { matrices(to, row, false); }
template <int Count> inline void load_transposed(u32 (&to)[Count], const void* row) { matrices(to, row, true); }
inline void store_matrices(void* row, const u32 (&from)[4]) {
    const int me = emulator::current, first = me & ~31, g = (me & 31) / 4, t = me & 3;
    if (reinterpret_cast<uintptr_t>(row) % 16) { fprintf(stderr, "emulator: a matrix row is not aligned\n"); abort(); }
    fragments()[me].row = row;
    emulator::wait(2);
    for (int i = 0; i < 4; ++i)
        memcpy((unsigned short*)fragments()[first + 8 * i + g].row + 2 * t, &from[i], sizeof from[i]);
    emulator::wait(2);
}

template <int Bytes> inline void copy(void* to, const void* from, bool inside) {
    const auto odd = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % Bytes != 0; };
    if (odd(to) || (inside && odd(from))) { fprintf(stderr, "emulator: a copy is not aligned\n"); abort(); }
    if (inside) memcpy(to, from, Bytes);
    else memset(to, 0, Bytes);
}
inline void copy_eight(void* to, const void* from, bool inside) { copy<8>(to, from, inside); }
inline void commit() {}
template <int Left> inline void wait() {}

}  // namespace tensor
