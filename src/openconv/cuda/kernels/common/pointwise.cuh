// The operations of an epilogue, each as docs and openconv.epilogue define it. A is float or double.
#pragma once

namespace op {

template <class A>
__device__ __forceinline__ A add(A a, A b) {
    return a + b;
}
template <class A>
__device__ __forceinline__ A sub(A a, A b) {
    return a - b;
}
template <class A>
__device__ __forceinline__ A mul(A a, A b) {
    return a * b;
}
template <class A>
__device__ __forceinline__ A div(A a, A b) {
    return a / b;
}
template <class A>
__device__ __forceinline__ A neg(A a) {
    return -a;
}

// fmax and fmin pass over a NaN; these keep it, as torch does.
template <class A>
__device__ __forceinline__ A max(A a, A b) {
    return a != a || a > b ? a : b;
}
template <class A>
__device__ __forceinline__ A min(A a, A b) {
    return a != a || a < b ? a : b;
}
template <class A>
__device__ __forceinline__ A relu(A a) {
    return a < A(0) ? A(0) : a;
}
template <class A>
__device__ __forceinline__ A clamp(A a, A low, A high) {
    return min(max(a, low), high);
}

__device__ __forceinline__ float abs(float a) { return fabsf(a); }
__device__ __forceinline__ double abs(double a) { return fabs(a); }
__device__ __forceinline__ float exp(float a) { return expf(a); }
__device__ __forceinline__ double exp(double a) { return ::exp(a); }
__device__ __forceinline__ float expm1(float a) { return expm1f(a); }
__device__ __forceinline__ double expm1(double a) { return ::expm1(a); }
__device__ __forceinline__ float tanh(float a) { return tanhf(a); }
__device__ __forceinline__ double tanh(double a) { return ::tanh(a); }
__device__ __forceinline__ float erf(float a) { return erff(a); }
__device__ __forceinline__ double erf(double a) { return ::erf(a); }

template <class A>
__device__ __forceinline__ A leaky_relu(A a, A slope) {
    return a > A(0) ? a : slope * a;
}
template <class A>
__device__ __forceinline__ A elu(A a, A alpha) {
    return a > A(0) ? a : alpha * expm1(a);
}
template <class A>
__device__ __forceinline__ A sigmoid(A a) {
    return A(1) / (A(1) + exp(-a));
}
template <class A>
__device__ __forceinline__ A silu(A a) {
    return a / (A(1) + exp(-a));
}
template <class A>
__device__ __forceinline__ A hardswish(A a) {
    return a * clamp(a + A(3), A(0), A(6)) / A(6);
}
template <class A>
__device__ __forceinline__ A gelu(A a) {
    return a / A(2) * (A(1) + erf(a * A(0.70710678118654752440)));
}
template <class A>
__device__ __forceinline__ A gelu_tanh(A a) {
    return a / A(2) * (A(1) + tanh(A(0.79788456080286535588) * (a + A(0.044715) * a * a * a)));
}

}  // namespace op
