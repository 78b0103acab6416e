/* The loops over parameters that the engine and the trainer run: plain C, one pass over memory each.
 *
 * A model travels as chunks of one element type. Four element types are known:
 * float32, float64, bfloat16 and float16. Arithmetic, corrections and sums are float64 for
 * float64 and float32 for the others. The wire carries the element type itself, or a 16-bit
 * type for float32 and float64 models.
 */
#ifndef HVD_ADPSGD_KERNELS_H
#define HVD_ADPSGD_KERNELS_H

#include <stdint.h>

enum { /* formats: element types, then codes of differences (codes.h) */
  ADPSGD_OWN = -1, /* in messages: the model's own element type */
  ADPSGD_FLOAT32 = 0,
  ADPSGD_FLOAT64 = 1,
  ADPSGD_BFLOAT16 = 2,
  ADPSGD_FLOAT16 = 3,
  ADPSGD_DTYPES = 4,
  ADPSGD_INT8 = 4,
  ADPSGD_INT4 = 5,
  ADPSGD_INT16 = 6 /* now and then in place of a format of fewer bits */
};

enum { ADPSGD_NOT_FINITE = 1, ADPSGD_HELD_BACK = 2 };

/* Bytes of one element, 0 for an unknown type. */
int adpsgd_itemsize(int dtype);

/* The type of corrections and of sums: float64 for float64, float32 for the others; and the bytes of one
 * element. */
int adpsgd_slot_dtype(int dtype);
int adpsgd_slot_itemsize(int dtype);

/* out = mirror + first + second, rounded to the type `wire`; first and second may be NULL. `wire` is
 * `dtype`, the type of sums, or a 16-bit type. Returns 1 if any element of out is infinite or not a number,
 * else 0. */
int adpsgd_snapshot(int dtype, int wire, void *out, const void *mirror, const void *first,
                    const void *second, int64_t n);

/* `stream` writes past the caches, for models larger than the caches. Stores after the call become visible
 * after the streamed ones. Exception: adpsgd_apply does not order them, because it is called for each of
 * many small tensors: its caller must fence. */

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

/* half = (theirs - mine) / 2, computed in the type `sums` and rounded to the type `wire`. Half of the
 * difference, because the difference of two finite numbers may be infinite. `keep` gets a second copy, in
 * the caches.
 * Returns 1 if any element of half is infinite or not a number, else 0. */
int adpsgd_half_difference(int sums, int wire, void *half, const adpsgd_model *mine,
                           const adpsgd_model *theirs, void *keep, int64_t n, int stream);

/* correction (+)= 2 weight half; `fresh` overwrites instead of adding. Returns sum((2 half)^2).
 * The peer merges the same numbers with -weight: exactly opposite terms. */
double adpsgd_merge_half(int dtype, int wire, void *correction, const void *half, double weight,
                         int64_t n, int fresh, int stream);

/* parameter += correction, or parameter = correction if `replace`; then mirror = parameter. The rounding
 * error of a 16-bit parameter is added to `back`, in the type of corrections (`fresh` overwrites).
 * correction, mirror and back may be NULL.
 * Returns ADPSGD_NOT_FINITE if any parameter is infinite or not a number, ADPSGD_HELD_BACK if any rounding
 * error is not 0, or both. */
int adpsgd_apply(int dtype, void *parameter, const void *correction, void *mirror, void *back,
                 int64_t n, int replace, int fresh, int stream);

/* With `replace` slot = sum / learners, else slot (+)= (sum - learners own) / learners, all in the type of
 * sums; `fresh` overwrites instead of adding.
 * Returns sum((sum / learners - own)^2); or -1, and slot is unchanged, if that is not finite. */
double adpsgd_merge_mean(int dtype, void *slot, const void *sum, const void *own, double learners,
                         int64_t n, int fresh, int replace);

/* Whether the size of any of n numbers in the type of sums exceeds half of the largest finite number: then
 * its distance from a mean may be infinite. */
int adpsgd_any_large(int dtype, const void *numbers, int64_t n);

#endif
