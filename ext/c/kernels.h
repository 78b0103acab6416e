/* The compute-side loops of the engine: plain C, one pass each.
 *
 * A model travels as chunks of one element type. Four element types are known:
 * float32, float64, bfloat16 and float16. Arithmetic is float64 for float64 and
 * float32 for the others. The wire carries the element type itself, or a 16-bit
 * type for float32 and float64 models.
 */
#ifndef HVD_ADPSGD_KERNELS_H
#define HVD_ADPSGD_KERNELS_H

#include <stdint.h>

enum {
  ADPSGD_FLOAT32 = 0,
  ADPSGD_FLOAT64 = 1,
  ADPSGD_BFLOAT16 = 2,
  ADPSGD_FLOAT16 = 3,
  ADPSGD_DTYPES = 4
};

/* Bytes of one element, 0 for an unknown type. */
int adpsgd_itemsize(int dtype);

/* out = round_wire(mirror + first + second); first and second may be NULL. `keep`, if not NULL,
 * gets a second copy, in the caches.
 * Returns 1 if any element of out is infinite or not a number, else 0. */
int adpsgd_snapshot(int dtype, int wire, void *out, const void *mirror, const void *first,
                    const void *second, void *keep, int64_t n, int stream);

/* `stream` writes past the caches: right for models larger than they are. */

/* correction (+)= weight * (received - sent); `fresh` overwrites instead of adding.
 * Returns sum((received - sent)^2). Both peers compute exactly opposite terms. */
double adpsgd_merge(int dtype, int wire, void *correction, const void *received, const void *sent,
                    double weight, int64_t n, int fresh, int stream);

/* parameter += correction, or parameter = correction if `replace`; then mirror = parameter.
 * correction and mirror may be NULL.
 * Returns 1 if any parameter is infinite or not a number, else 0. */
int adpsgd_apply(int dtype, void *parameter, const void *correction, void *mirror, int64_t n,
                 int replace, int stream);

/* Sums over all learners are made in float64 for float64, in float32 for the other types. */
int adpsgd_sum_itemsize(int dtype);

/* out = own in the type of sums, or zeros if `none`. */
void adpsgd_widen(int dtype, void *out, const void *own, int64_t n, int none);

/* With `replace` slot = sum / learners, else slot (+)= (sum - learners own) / learners, where own and
 * sum are in the type of sums; `fresh` overwrites instead of adding.
 * Returns sum((sum / learners - own)^2), or -1 and leaves slot alone if that is not finite. */
double adpsgd_merge_mean(int dtype, void *slot, const void *sum, const void *own, double learners,
                         int64_t n, int fresh, int replace);

#endif
