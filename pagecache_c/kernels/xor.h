/* xor.h - bytes XORed: what parity is made of. Owns nothing. */
#ifndef PC_XOR_H
#define PC_XOR_H

#include "pagecache.h"

/* out[i] = a[i] ^ b[i]; out may be a or b, and else lies apart from both. Any alignment. */
void pc__xor(void *out, const void *a, const void *b, size_t n_bytes);

#endif
