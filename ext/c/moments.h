/* The passes over the moments of an adaptive optimizer: see hvd_adpsgd/training/shared_moments.py. */
#ifndef HVD_ADPSGD_MOMENTS_H
#define HVD_ADPSGD_MOMENTS_H

#include <stdint.h>

#define ADPSGD_MOST 1e4

typedef struct {
  double lacking; /* q, the weight of v_i in x */
  double decay;   /* b, of the second moment, per step */
  double known;   /* what an average that began with 0 has of its weight: 1 - b^steps */
  double share;   /* 1 / n */
  double l2;      /* factor of the parameter in the gradient */
  double first;   /* a, of the first moment */
  double bound;   /* own gradients give no first moment whose square is larger than bound times own */
} adpsgd_second;

/* With g = gradient + l2 parameter, own = b second + (1 - b) g^2, mean = max(0, known cross + q own) and
 * v = mean + (own - mean) / n: second = (v - (1 - b) g^2) / b, of which an optimizer's update makes v;
 * unchanged where own is not finite.
 * With m = a moment + (1 - a) g the new first moment, known cross is first limited to ADPSGD_MOST times the
 * larger of own and m^2. Where m^2 > bound own, it is then made at least m^2 / bound.
 * `dtype` is that of kernels.h: float32 or float64. own may not overlap the others. */
void adpsgd_correct(int dtype, void *second, void *own, const void *gradient, const void *parameter,
                    const void *moment, void *cross, const adpsgd_second *law, int64_t n);

typedef struct {
  double rate;  /* 1 - b */
  double scale; /* 1 / (r w): the peers' mean is offered + scale (moment - before) */
  double known; /* divides the product */
} adpsgd_product;

/* Where moment differs from before: cross += rate (offered (offered + scale (moment - before)) / known - cross).
 * Returns in `arrived` the number of these elements; in `live` that of these and of all where offered is not 0. */
void adpsgd_multiply(int dtype, void *cross, const void *moment, const void *before, const void *offered,
                     const adpsgd_product *law, int64_t n, int64_t *arrived, int64_t *live);

#endif
