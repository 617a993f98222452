// The operations of epilogues and trees that are not basic, each as docs and openconv.epilogue define it. A is float or
// double. Text that is generated may hold this file without its first lines, behind common/pointwise.cuh.
#pragma once
#include "common/pointwise.cuh"

namespace op {

__device__ __forceinline__ float mod(float a, float b) { return fmodf(a, b); }
__device__ __forceinline__ double mod(double a, double b) { return ::fmod(a, b); }
__device__ __forceinline__ float pow(float a, float b) { return powf(a, b); }
__device__ __forceinline__ double pow(double a, double b) { return ::pow(a, b); }
__device__ __forceinline__ float atan2(float a, float b) { return atan2f(a, b); }
__device__ __forceinline__ double atan2(double a, double b) { return ::atan2(a, b); }
__device__ __forceinline__ float ceil(float a) { return ceilf(a); }
__device__ __forceinline__ double ceil(double a) { return ::ceil(a); }
__device__ __forceinline__ float floor(float a) { return floorf(a); }
__device__ __forceinline__ double floor(double a) { return ::floor(a); }
__device__ __forceinline__ float sin(float a) { return sinf(a); }
__device__ __forceinline__ double sin(double a) { return ::sin(a); }
__device__ __forceinline__ float cos(float a) { return cosf(a); }
__device__ __forceinline__ double cos(double a) { return ::cos(a); }
__device__ __forceinline__ float tan(float a) { return tanf(a); }
__device__ __forceinline__ double tan(double a) { return ::tan(a); }
__device__ __forceinline__ float log(float a) { return logf(a); }
__device__ __forceinline__ double log(double a) { return ::log(a); }
__device__ __forceinline__ float log1p(float a) { return log1pf(a); }
__device__ __forceinline__ double log1p(double a) { return ::log1p(a); }
__device__ __forceinline__ float sqrt(float a) { return sqrtf(a); }
__device__ __forceinline__ double sqrt(double a) { return ::sqrt(a); }

template <class A>
__device__ __forceinline__ A add_square(A a, A b) {
    return a + b * b;
}
template <class A>
__device__ __forceinline__ A rsqrt(A a) {
    return A(1) / sqrt(a);
}
template <class A>
__device__ __forceinline__ A reciprocal(A a) {
    return A(1) / a;
}
// 0 of a NaN, as torch has it.
template <class A>
__device__ __forceinline__ A sign(A a) {
    return a > A(0) ? A(1) : a < A(0) ? A(-1) : A(0);
}

// Of one that e^t would overflow for, e^-|t| is 0.
template <class A>
__device__ __forceinline__ A softplus(A a, A beta) {
    const A t = beta * a;
    return (max(t, A(0)) + log1p(exp(-abs(t)))) / beta;
}
template <class A>
__device__ __forceinline__ A swish(A a, A beta) {
    return a * sigmoid(beta * a);
}

template <class A>
__device__ __forceinline__ A cmp_eq(A a, A b) {
    return a == b ? A(1) : A(0);
}
template <class A>
__device__ __forceinline__ A cmp_neq(A a, A b) {
    return a != b ? A(1) : A(0);
}
template <class A>
__device__ __forceinline__ A cmp_gt(A a, A b) {
    return a > b ? A(1) : A(0);
}
template <class A>
__device__ __forceinline__ A cmp_ge(A a, A b) {
    return a >= b ? A(1) : A(0);
}
template <class A>
__device__ __forceinline__ A cmp_lt(A a, A b) {
    return a < b ? A(1) : A(0);
}
template <class A>
__device__ __forceinline__ A cmp_le(A a, A b) {
    return a <= b ? A(1) : A(0);
}
template <class A>
__device__ __forceinline__ A logical_and(A a, A b) {
    return a != A(0) && b != A(0) ? A(1) : A(0);
}
template <class A>
__device__ __forceinline__ A logical_or(A a, A b) {
    return a != A(0) || b != A(0) ? A(1) : A(0);
}
template <class A>
__device__ __forceinline__ A logical_not(A a) {
    return a == A(0) ? A(1) : A(0);
}
template <class A>
__device__ __forceinline__ A select(A a, A b, A c) {
    return a != A(0) ? b : c;
}

// Gradients: a is that of the result, b what went in.
template <class A>
__device__ __forceinline__ A relu_backward(A a, A b) {
    return b > A(0) ? a : A(0);
}
template <class A>
__device__ __forceinline__ A leaky_relu_backward(A a, A b, A slope) {
    return b > A(0) ? a : slope * a;
}
template <class A>
__device__ __forceinline__ A elu_backward(A a, A b, A alpha) {
    return b > A(0) ? a : a * (alpha * exp(b));
}
template <class A>
__device__ __forceinline__ A clamp_backward(A a, A b, A low, A high) {
    return b >= low && b <= high ? a : A(0);
}
template <class A>
__device__ __forceinline__ A sigmoid_backward(A a, A b) {
    const A gate = sigmoid(b);
    return a * (gate * (A(1) - gate));
}
template <class A>
__device__ __forceinline__ A tanh_backward(A a, A b) {
    const A t = tanh(b);
    return a * (A(1) - t * t);
}
template <class A>
__device__ __forceinline__ A softplus_backward(A a, A b, A beta) {
    return a * sigmoid(beta * b);
}
template <class A>
__device__ __forceinline__ A swish_backward(A a, A b, A beta) {
    const A gate = sigmoid(beta * b);
    return a * (gate * (A(1) + beta * b * (A(1) - gate)));
}
template <class A>
__device__ __forceinline__ A hardswish_backward(A a, A b) {
    return a * (b <= A(-3) ? A(0) : b < A(3) ? b / A(3) + A(0.5) : A(1));
}
template <class A>
__device__ __forceinline__ A gelu_backward(A a, A b) {
    const A bell = exp(b * b * A(-0.5)) * A(0.39894228040143267794);  // 1 / sqrt(2 pi)
    return a * (A(0.5) * (A(1) + erf(b * A(0.70710678118654752440))) + b * bell);
}
template <class A>
__device__ __forceinline__ A gelu_tanh_backward(A a, A b) {
    const A root = A(0.79788456080286535588), inner = tanh(root * (b + A(0.044715) * b * b * b));
    const A slope = root * (A(1) + A(3 * 0.044715) * b * b);
    return a * (A(0.5) * (A(1) + inner) + A(0.5) * b * (A(1) - inner * inner) * slope);
}

}  // namespace op
