/* 16-bit numbers (bfloat16, float16) to float32 and back, many at a time. */
#ifndef HVD_ADPSGD_NARROW_H
#define HVD_ADPSGD_NARROW_H

#include <stdint.h>

/* Compile a function once per vector width; the processor's version is chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define ADPSGD_VECTOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ADPSGD_VECTOR
#endif

/* out = in, exactly. `dtype`: ADPSGD_BFLOAT16 or ADPSGD_FLOAT16. */
void adpsgd_widen(int dtype, float *out, const void *in, int64_t n);

/* out = in, rounded to nearest, ties to even; NaN stays NaN. Returns 1 if any element of out is infinite or not
 * a number, else 0. */
int adpsgd_narrow(int dtype, void *out, const float *in, int64_t n);

/* out = (x - y) / 2, rounded, in one pass; all are 16-bit numbers of the same type. Returns k: the first k
 * of the n numbers are done, and the caller must do the rest: the processor converts several numbers at a
 * time, or none. */
int64_t adpsgd_half_16(int dtype, void *out, const void *x, const void *y, int64_t n);

/* Return 1 if any of n stored numbers is infinite or not a number, else 0. copy_16 also does out = in, and
 * reads each number once. */
int adpsgd_infinite_16(int dtype, const void *in, int64_t n);
int adpsgd_copy_16(int dtype, void *out, const void *in, int64_t n);

#endif
