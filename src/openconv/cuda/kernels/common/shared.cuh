// Shared memory of the size that the launch gives: more than the 48 KB of static arrays.
#pragma once
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
