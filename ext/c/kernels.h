/* The compute-side loops of the engine: plain C, one pass each.
 *
 * A model travels as chunks of one element type. Four element types are known:
 * float32, float64, bfloat16 and float16. Arithmetic, corrections and sums are float64 for
 * float64 and float32 for the others. The wire carries the element type itself, or a 16-bit
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

enum { ADPSGD_NOT_FINITE = 1, ADPSGD_HELD_BACK = 2 };

/* Bytes of one element, 0 for an unknown type. */
int adpsgd_itemsize(int dtype);

/* The type of corrections and of sums: float64 for float64, float32 for the others; bytes of one. */
int adpsgd_slot_dtype(int dtype);
int adpsgd_slot_itemsize(int dtype);

/* out = round_wire(mirror + first + second); first and second may be NULL. The wire is the type itself, the
 * type of sums, or a 16-bit one. `keep`, if not NULL, gets a second copy, in the caches.
 * Returns 1 if any element of out is infinite or not a number, else 0. */
int adpsgd_snapshot(int dtype, int wire, void *out, const void *mirror, const void *first,
                    const void *second, void *keep, int64_t n, int stream);

/* `stream` writes past the caches: right for models larger than they are. Stores after the call are visible after
 * those past the caches; not so after adpsgd_apply, which is called for each of many small tensors: its caller fences. */

/* correction (+)= weight * (received - sent); `fresh` overwrites instead of adding.
 * Returns sum((received - sent)^2). Both peers compute exactly opposite terms. */
double adpsgd_merge(int dtype, int wire, void *correction, const void *received, const void *sent,
                    double weight, int64_t n, int fresh, int stream);

/* A chunk of a model: base + first + second. first and second may be NULL. */
typedef struct {
  int dtype; /* of base */
  const void *base;
  const void *first;
  const void *second;
} adpsgd_model;

/* half = round_wire((theirs - mine) / 2); of the type of sums `sums`. It is half, for the difference of two finite
 * numbers may be infinite. `keep` gets a second copy, in the caches.
 * Returns 1 if any element of half is infinite or not a number, else 0. */
int adpsgd_half_difference(int sums, int wire, void *half, const adpsgd_model *mine,
                           const adpsgd_model *theirs, void *keep, int64_t n, int stream);

/* correction (+)= 2 weight half; `fresh` overwrites instead of adding. Returns sum((2 half)^2).
 * The peer merges the same numbers with -weight: exactly opposite terms. */
double adpsgd_merge_half(int dtype, int wire, void *correction, const void *half, double weight,
                         int64_t n, int fresh, int stream);

/* parameter += correction, or parameter = correction if `replace`; then mirror = parameter.
 * What rounding to 16 bits holds back is added to `back`, in the type of corrections (`fresh` overwrites).
 * correction, mirror and back may be NULL.
 * Returns ADPSGD_NOT_FINITE if any parameter is infinite or not a number, and ADPSGD_HELD_BACK if
 * anything was held back, or both. */
int adpsgd_apply(int dtype, void *parameter, const void *correction, void *mirror, void *back,
                 int64_t n, int replace, int fresh, int stream);

/* With `replace` slot = sum / learners, else slot (+)= (sum - learners own) / learners, all in the type of
 * sums; `fresh` overwrites instead of adding.
 * Returns sum((sum / learners - own)^2), or -1 and leaves slot alone if that is not finite. */
double adpsgd_merge_mean(int dtype, void *slot, const void *sum, const void *own, double learners,
                         int64_t n, int fresh, int replace);

/* Whether any of n numbers in the type of sums is above half of the largest one: its distance from a mean
 * may be infinite. */
int adpsgd_any_large(int dtype, const void *numbers, int64_t n);

#endif
