/* Differences of two models in few bits: 4, 8 or 16 per element, with a step for each block of 256 elements.
 *
 * One side offers its chunk on a grid, element by element round(x / step) modulo 2^bits; so the other side
 * knows the difference to its own chunk as long as that is below 2^(bits - 1) steps. It answers with the
 * difference in steps, and both merge the answer, with opposite signs: so the mean of the two models is kept,
 * whatever the answer is. What rounding leaves out stays in the difference of the models, for the next
 * exchange. A larger difference appears as a smaller one (it wraps). Where a whole block does, its
 * differences are about uniform: it is passed over, and its step grows. An offer of 16 bits has steps that follow
 * from the block's numbers, so that nothing wraps, and the answer has coarser ones where the other side's numbers
 * are larger: whatever the two models are, their difference is known. Such offers begin, and bring back now and
 * then what has wrapped.
 *
 * Steps are powers of two, and travel as such: 2048 is the step 1, 2049 the step 2. Each side has a table of the
 * steps of its next offers, which it learns from the differences that it has merged.
 *
 * A message: its format in two bytes, a step for each block, in two bytes, then the codes, two of 4 bits in a byte.
 * It is aligned to two bytes.
 *
 * Source: Lu and De Sa, Moniqua: modulo quantized communication in decentralized SGD, arXiv:2002.11787.
 */
#ifndef HVD_ADPSGD_CODES_H
#define HVD_ADPSGD_CODES_H

#include <stdint.h>

#include "kernels.h"

enum { ADPSGD_CODES_BLOCK = 256 };

/* Bits per element of a format of codes; 0 for others. */
int adpsgd_codes_bits(int format);

/* The format that a message of two bytes or more names, and the bytes of a whole message. */
int adpsgd_codes_format(const void *message);
int64_t adpsgd_codes_nbytes(int format, int64_t n);

/* Number of blocks of n elements. */
int64_t adpsgd_codes_blocks(int64_t n);

/* out = the chunk `mine` on the grid of `steps`, or of coarser ones where these are too fine for the chunk's
 * numbers; with INT16 of steps that follow from the numbers alone. `sums` is the type of sums. Returns 1 if an
 * element is infinite or not a number, else 0. */
int adpsgd_codes_offer(int format, int sums, void *out, const adpsgd_model *mine, const uint16_t *steps,
                       int64_t n);

/* out = (the offered chunk - mine) in steps, in the format of the offer. Returns as adpsgd_codes_offer. */
int adpsgd_codes_answer(int sums, void *out, const void *offer, const adpsgd_model *mine, int64_t n);

/* correction (+)= weight * the differences of an answer; `fresh` overwrites instead of adding. `steps` (NULL:
 * not wanted) become those of the next offer in the format `next`. Both sides pass over a block whose correction
 * would be infinite. Returns the sum of squared differences. */
double adpsgd_codes_merge(int next, int sums, void *correction, const void *answer, double weight,
                          uint16_t *steps, int64_t n, int fresh);

#endif
