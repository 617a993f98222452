// As common/shared.cuh, with room for boxes that are swizzled, if `boxed`: the pattern of 128 bytes begins anew every
// 1024.
#pragma once
#define DYNAMIC_SHARED_BOXES(name, boxed) extern __shared__ __align__((boxed) ? 1024 : 128) unsigned char name[]
