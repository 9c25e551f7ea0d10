/* Linear attention on the CPU, map included: features are computed and consumed in the cache.

   Tensors are those of `linearize.ops`: q [B, H, T, D], k [B, K, T, D], v [B, K, T, V], state [B, K, F, V + 1] and its
   log-scale [B, K]. Internally, features are [F, tokens], so every elementary function, including softmax over the
   features, runs along tokens, and every product reads its operands in order. */

#include "bidirectional.h"
#include "bidirectional_gradient.h"
#include "causal.h"
#include "causal_gradient.h"
#include "choose_keys.h"
#include "features.h"
#include "routed.h"
#include "step.h"
#include "window_gradient.h"

/* The sizes of the structures, so that the caller can compare them with its own. */
int64_t linearize_call_size(void) { return sizeof(call_t); }
int64_t linearize_back_size(void) { return sizeof(back_t); }
int64_t linearize_window_size(void) { return sizeof(window_t); }
int64_t linearize_window_back_size(void) { return sizeof(window_back_t); }
int64_t linearize_routed_size(void) { return sizeof(routed_t); }
int64_t linearize_choice_size(void) { return sizeof(choice_t); }

/* The names of maps, types and results in the order of their numbers, for the same comparison. */
const char *linearize_names(void) { return EACH_MAP(NAME) ";" EACH_TYPE(NAME) ";" EACH_RESULT(NAME); }

/* Whether it multiplies bf16 numbers directly. */
int linearize_pairs(void) { return PAIRS; }

/* Whether it was compiled to run in several threads. */
int linearize_parallel(void) {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}
