/* reduce.h - two arrays of numbers made one, element by element.
 *
 * Owns nothing and knows nothing of members or sockets. Results are NumPy's: integers wrap around,
 * NaN goes through minimum and maximum, and halves are computed as floats and rounded after each step.
 */
#ifndef PC_REDUCE_H
#define PC_REDUCE_H

#include "pagecache.h"

/* out[i] = a[i] op b[i]; out may be a or b. Aligned to their elements. */
typedef void pc__reduce_fn(void *out, const void *a, const void *b, size_t n_elements);

/* NULL where there is no such dtype or op. PC_OP_MEAN is a sum: see pc__reduce_divide. */
pc__reduce_fn *pc__reducer(int dtype, int op);
/* Bytes of an element; 0 where there is no such dtype. */
size_t pc__dtype_bytes(int dtype);
/* Whether a mean of it is of the same dtype. */
int pc__dtype_is_float(int dtype);
/* Divides in place, as NumPy's true_divide does. For floats only. */
void pc__reduce_divide(int dtype, void *data, size_t n_elements, uint32_t by);
/* Halves as floats, and back. */
void pc__reduce_widen(float *out, const void *halves, size_t n_elements);
void pc__reduce_narrow(void *halves, const float *from, size_t n_elements);

#endif
