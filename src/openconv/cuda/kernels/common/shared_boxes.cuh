// As common/shared.cuh, where boxes come to that are swizzled: the pattern of 128 bytes begins anew every 1024.
#pragma once
#define DYNAMIC_SHARED_BOXES(name) extern __shared__ __align__(1024) unsigned char name[]
