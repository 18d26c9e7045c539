/* toka.h - toka, a high-throughput LLM inference engine in one C file.  SPDX-License-Identifier: Apache-2.0
 *
 * Upper half: the public API, all a program needs that links toka.o.
 * Lower half: the backend boundary, seen only by toka.c and toka_kernels.cu (they define TOKA_INTERNAL).
 *
 * The least a program does:
 *
 *     toka *t; toka_err e;
 *     toka_options o = toka_options_default();
 *     o.model = "path/to/model";
 *     if (toka_open(&t, &o, &e)) { fprintf(stderr, "%s\n", e.msg); return 1; }
 *     toka_request r = toka_request_default();
 *     r.text = "Once upon a time"; r.text_bytes = 16; r.sampling.max_tokens = 64;
 *     toka_generate(t, &r, on_event, NULL, NULL, &e);       // on_event gets the text piece by piece
 *     toka_close(t);
 *
 * Conventions. Functions that can fail return 0 or a negative toka_code and fill *e (never NULL) with one sentence.
 * Text is UTF-8, given as pointer and byte count, borrowed for the call. Memory handed out says who frees it.
 * Token ids are int32. Log-probabilities are natural logarithms, float32. Lengths are counted in tokens unless the
 * name says _bytes. "Thread: any" is also several at once. Where the system has no memory left for something small, the process is
 * aborted. */
#ifndef TOKA_H
#define TOKA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TOKA_VERSION "0.1.0"

/* ---- Errors ------------------------------------------------------------------------------------------------- */

typedef enum toka_code {
    TOKA_OK = 0,
    TOKA_E_USE = -1,      /* a wrong argument, flag or request */
    TOKA_E_INPUT = -2,    /* a file or text that is broken, hostile or not supported */
    TOKA_E_IO = -3,       /* the operating system refused: open, read, write, map */
    TOKA_E_DEVICE = -4,   /* the device refused or failed */
    TOKA_E_MEMORY = -5,   /* not enough memory for what was asked */
    TOKA_E_CANCELLED = -6 /* a callback asked to stop */
} toka_code;

typedef struct toka_err {
    int code;      /* toka_code */
    char msg[500]; /* one sentence without a final period: what, where, found, expected */
} toka_err;

/* ---- Opening a model ---------------------------------------------------------------------------------------- */

typedef struct toka toka; /* an open model with its tokenizer, template, device and engine */

typedef struct toka_options {
    const char *model;          /* folder in Hugging Face layout, hub id in the local hub cache, or a name of models.txt;
                                   NULL: the model embedded in the program, where it was built in */
    const char *models_file;    /* models.txt, to resolve names; NULL: beside the program, or ./models.txt */
    const char *chat_template;  /* file with a Jinja template, or the name of one of the model's,
                                   as rag; NULL: its "default", and its "tool_use" for tools */
    const char *device;         /* "auto", "cpu" or "cuda"; NULL: auto */
    int n_threads;              /* CPU backend's threads, of all its devices together, at most 1,024; 0: one a core */
    int max_model_len;          /* longest sequence, tokens; 0: the model's own limit, lowered to what memory holds */
    int max_num_batched_tokens; /* most tokens in one forward step; 0: chosen by the backend */
    int max_num_seqs;           /* most sequences running at once; 0: chosen by the backend */
    int tensor_parallel_size;   /* devices that share each layer's heads and columns and the vocabulary; 0: 1 */
    int pipeline_parallel_size; /* stages, each with some of the layers, on devices of their own; 0: 1 */
    int data_parallel_size;     /* replicas of the model, each with devices, steps, running sequences and a KV cache of its own,
                                   of the sizes given here; 0: 1 */
    int64_t kv_tokens;          /* tokens that the KV cache holds, 2 or more; 0: as many as memory allows */
    bool no_prefix_caching;     /* no pages and no attention are shared, neither among samples nor among equal beginnings: every
                                   sample computes its whole prompt. Results are the same; it is there to measure what sharing
                                   saves */
    bool enforce_eager;         /* on a GPU: no step is captured as a CUDA graph, all are launched kernel by kernel */
    double gpu_memory_utilization; /* share of the GPU's free memory that may be taken, in (0,1]; 0: 0.9 */
    void (*progress)(void *user, const char *what, double done); /* told while toka_open works, or NULL; done: 0 to 1. Any thread,
                                                                    one at a time */
    void *progress_user;
} toka_options;

/* All fields at their defaults. Thread: any. */
toka_options toka_options_default(void);

/* Opens a model: maps its files, checks every shape, takes all memory. *out is the caller's until toka_close, NULL after an error.
 * The options and the texts they point to are looked at during the call only. Several models may be open beside one another, also
 * one more than once; on a GPU each takes its share of what the others left.
 * The files stay mapped, and a CPU reads the weights there: a file that is cut short meanwhile, or whose disk fails, is a SIGBUS
 * on whatever thread reads it. Only toka_main has a handler for that. Replace files by renaming new ones over them.
 * Errors: TOKA_E_USE, TOKA_E_INPUT, TOKA_E_IO, TOKA_E_DEVICE, TOKA_E_MEMORY. Thread: any. */
int toka_open(toka **out, const toka_options *options, toka_err *e);

/* Frees everything; NULL is allowed. No call on t may be under way. Requests that have not ended get their last events,
 * TOKA_CANCELLED, on this thread; a toka_submit in their callbacks is refused, with TOKA_E_CANCELLED. Thread: any, but not in a
 * callback. */
void toka_close(toka *t);

/* What was opened; the strings live as long as t. Thread: any. */
typedef struct toka_info {
    const char *model_name, *architecture, *device; /* the folder's last part, hub id or name; as config.json has it; one line */
    int64_t n_parameters;
    int n_layers, n_heads, n_kv_heads;  /* n_heads: of queries */
    int head_size, width, mlp_width;    /* elements: of a head, of the residual stream, within the MLP */
    int vocab_size;                     /* ids that a prompt may have and that are drawn: 0 .. vocab_size-1 */
    int max_model_len;                  /* tokens a sequence may have, prompt and output together */
    int bos_id, eos_id;                 /* -1: none. eos_id: the first, where a model has several; each of them ends a sample */
    int has_chat_template;              /* 1: there is one that can be used; else 0 */
} toka_info;
toka_info toka_get_info(const toka *t);

/* ---- Text and tokens. Thread: any, in callbacks too. After an error what is to be handed out stays as it was -------- */

enum {
    TOKA_ADD_SPECIAL = 1,   /* encode: add what the tokenizer adds around a text (usually the begin token) */
    TOKA_PARSE_SPECIAL = 2, /* encode: a special token's text in the input becomes that token. Off for untrusted text */
    TOKA_SKIP_SPECIAL = 4   /* decode: leave special tokens out */
};

/* Text to ids. *ids is malloc'ed, the caller frees it, also where there are none. text may be NULL where text_bytes is 0. Invalid
 * UTF-8 bytes count as U+FFFD. Errors: TOKA_E_INPUT: the model has no tokenizer.json; TOKA_E_USE: a text of 2 GiB or more. */
int toka_encode(const toka *t, const char *text, size_t text_bytes, int flags, int32_t **ids, size_t *n_ids, toka_err *e);

/* Ids to text. *text is malloc'ed and NUL-terminated, the caller frees it; *text_bytes is without the NUL. ids may be NULL where
 * n_ids is 0. Errors: TOKA_E_INPUT: the model has no tokenizer.json; TOKA_E_USE: an id that the tokenizer does not have. */
int toka_decode(const toka *t, const int32_t *ids, size_t n_ids, int flags, char **text, size_t *text_bytes, toka_err *e);

/* Renders the chat template. `context` is a JSON object: "messages", "tools", "add_generation_prompt" (false, unless it is there)
 * and further keyword arguments (enable_thinking ...); what may be left out, even messages, is the template's to say. now:
 * "YYYY-MM-DD hh:mm:ss" for strftime_now, NULL: local time. *text is malloc'ed and NUL-terminated, the caller frees it;
 * *text_bytes is without the NUL. Special tokens are in the text, the begin token where the template writes it: encode it with
 * TOKA_PARSE_SPECIAL alone.
 * Errors: TOKA_E_USE: the model has no template, context is no object, or now has another form; TOKA_E_INPUT: context is no JSON,
 * or the template cannot be used or fails on it. */
int toka_apply_chat_template(const toka *t, const char *context, size_t context_bytes, const char *now, char **text,
                             size_t *text_bytes, toka_err *e);

/* ---- Requests ------------------------------------------------------------------------------------------------ */

/* Texts that an output may not have. No token may complete one of them, with or without a space
 * before it, whatever tokens its beginning came in. A longer word that contains it is another word,
 * and may come where it is one token (`class` for `ass`). */
typedef struct toka_words toka_words;

/* Looks up n of them in t's vocabulary: 1 to 2,048, of at most 32,768 bytes in all; spaces before a
 * text do not count. Costs a look at the whole vocabulary, so that one should serve many requests;
 * toka_submit keeps what it needs. *out is the caller's until toka_words_del, which may come behind
 * toka_close. After an error *out is NULL.
 * Errors: TOKA_E_USE: other numbers than these, or a text without tokens; TOKA_E_INPUT: the model
 * has no tokenizer.json. Thread: any. */
int toka_words_new(toka_words **out, const toka *t, const char *const *words, int n, toka_err *e);
void toka_words_del(toka_words *w); /* NULL is allowed. Thread: any */

/* Sampling parameters. Order of work on a row of logits, as Hugging Face's: logit_bias, allowed ids, repetition, presence and
 * frequency penalty, min_tokens and bad words (ids forbidden), temperature, top-k, top-p, min-p, draw. */
typedef struct toka_sampling {
    float temperature;          /* 0: greedy, the highest logit, lowest id on a tie */
    float top_p;                /* in (0,1]; 1: off */
    float min_p;                /* in [0,1]; 0: off */
    int top_k;                  /* 0 or -1: off */
    float repetition_penalty;   /* 0.01 to 100; 1: off; over prompt and output */
    float presence_penalty;     /* -2 to 2; 0: off; over the output */
    float frequency_penalty;    /* -2 to 2; 0: off; over the output */
    uint64_t seed;              /* the draw is a pure function of (seed, sample index, position) */
    int max_tokens;             /* output tokens at most; 0, or more than that: what max_model_len leaves */
    int min_tokens;             /* so many tokens have no end id, and no stop string ends in them */
    int ignore_eos;             /* go on past end-of-sequence ids */
    int logprobs;               /* top-k log-probabilities per token, at most TOKA_MAX_LOGPROBS; 0: only the chosen token's;
                                   TOKA_NO_LOGPROBS: not even that, which spares work. What is drawn does not depend on it */
    const int32_t *stop_ids;    /* end after any of these ids */
    int n_stop_ids;
    const char *const *stop;    /* end when any of these texts appears, also across token borders; at most 256, of 1 to 4,096
                                   bytes */
    int n_stop;
    int include_stop;           /* the stop string itself stays in the text, or the text of the id that ends it */
    const int32_t *bias_ids;    /* logit_bias: bias_values[i], -100 to 100, is added to logit bias_ids[i] */
    const float *bias_values;
    int n_bias;
    const int32_t *allowed_ids; /* only these ids may be drawn; n_allowed 0: all */
    int n_allowed;
    const int32_t *bad_ids;     /* bad words: sequences of ids, one behind the other, of bad_lengths[i] >= 1 ids each. The last id
                                   of one may not be drawn where the output ends in the ids before it */
    const int *bad_lengths;
    int n_bad;
    toka_words *bad_words;      /* of toka_words_new, whatever pieces they come in; NULL: none */
} toka_sampling;

#define TOKA_MAX_LOGPROBS 32  /* cap of toka_sampling.logprobs and toka_request.prompt_top */
#define TOKA_NO_LOGPROBS (-1) /* toka_sampling.logprobs: event.logprob is not looked at */

typedef struct toka_request {
    const char *text;   /* prompt as text (NULL where text_bytes is 0) ... */
    size_t text_bytes;
    int text_flags;     /* of toka_encode. With ADD_SPECIAL an empty text is a prompt: the begin token, if the model has one */
    const int32_t *ids; /* ... or as ids, if not NULL */
    size_t n_ids;
    int n;              /* samples of this prompt, numbered from 0, at most 1 << 20; 0: none, it needs prompt_logprobs then */
    toka_sampling sampling;
    int prompt_logprobs;   /* an event of sample TOKA_PROMPT for each token of the prompt, in order, before sample 0's first; that
                              sample computes its whole prompt, whatever of it is in the prefix tree */
    int prompt_top;        /* and in them the top-k log-probabilities of each place */
    int prompt_ranks;      /* and the rank of each token, for which all logits are looked at */
    int keep_special;      /* special tokens stay in the text; those that end a sample only with include_stop */
    int ids_only;          /* events have no text (NULL), unless stop strings make the engine look at it: the caller makes it */
    int priority;          /* a head start in the queue, higher is earlier; 0 is usual */
    uint64_t length_class; /* requests with equal keys have outputs of like length; 0: this request's samples only */
} toka_request;

/* No prompt yet, one sample, temperature 1, no truncation, seed 0, text_flags ADD_SPECIAL | PARSE_SPECIAL. Thread: any. */
toka_request toka_request_default(void);

/* Sets what the model's generation_config says: temperature (0 if do_sample is false), top_p, top_k,
 * min_p, repetition_penalty, max_tokens (max_new_tokens), min_tokens (min_new_tokens), stop
 * (stop_strings), bad_ids (bad_words_ids); the last two stay t's. What it does not say stays. t NULL:
 * nothing. Thread: any. */
void toka_request_model_defaults(const toka *t, toka_request *r);

typedef enum toka_finish {
    TOKA_RUNNING = 0, /* more will come */
    TOKA_STOP,        /* end-of-sequence id, stop id or stop string; or, with id -1, nothing was
                         left that may be drawn */
    TOKA_LENGTH,      /* max_tokens or max_model_len; or the end of a prompt without samples */
    TOKA_CANCELLED,
    TOKA_FAILED       /* the device failed; toka_run says how */
} toka_finish;

enum { TOKA_PROMPT = -1 }; /* the sample of events for tokens of the prompt */

typedef struct toka_event { /* one token of one sample; all pointers are valid during the callback only */
    int sample;             /* 0 .. n-1, or TOKA_PROMPT */
    int32_t id;             /* the token; -1: none, the sample was cancelled or failed, or nothing
                               was left that may be drawn */
    float logprob;          /* log-softmax of the raw logits at id; 0 for the first token of a prompt, which has no logits; NAN for
                               a token drawn with TOKA_NO_LOGPROBS, so that nobody takes it for one */
    float sampled_logprob;  /* the same after penalties, temperature and truncation: the distribution drawn from. Always there */
    int n_top;              /* = sampling.logprobs, prompt_top: the best ids by raw logit, best first; 0 at a prompt's first, and
                               with TOKA_NO_LOGPROBS */
    const int32_t *top_ids;
    const float *top_logprobs;
    int rank;               /* with prompt_ranks: the place of a prompt's id in the vocabulary by
                               raw logit, 1 is the best, of equal ones the lowest id first; else 0,
                               also at a prompt's first */
    const char *text;       /* text that became certain with this token: whole characters, never part of a stop string. May be NULL
                               where text_bytes is 0: of prompts there is none */
    size_t text_bytes;
    toka_finish finish;
    int stop_id;            /* the id that ended it, -1 if none */
    int stop_text;          /* index in sampling.stop of the text that ended it, -1 if none */
    int n_cached;           /* tokens of its prompt that the sample found computed in the prefix tree when it started */
    int more;               /* 1: the next event comes at once and is this request's too. What costs per call can wait for a 0 */
} toka_event;

/* Called between steps, on the thread that drives the engine (in toka_run, toka_generate or toka_score; the last events also in
 * toka_close), so it should be quick and must call none of these itself; all other functions are allowed. Where an fn is asked for
 * NULL will do: no events. Every sample (n 0: the prompt) ends in exactly one event whose finish is not TOKA_RUNNING. Returns 0 to
 * go on; anything else cancels what is left of the request. */
typedef int toka_event_fn(void *user, const toka_event *event);

typedef struct toka_usage {
    int64_t prompt_tokens, output_tokens; /* prompt counted once, output summed over samples */
    double prefill_s, decode_s;           /* wall time from submit to the first token of any sample; from there to the end */
} toka_usage;

/* Runs one request to its end, beside all others that are under way. usage may be NULL; it stays as it was if the request is
 * refused. Errors: TOKA_E_USE: a field out of its range, a prompt without tokens or of more than max_model_len - 1 (with n 0:
 * max_model_len); TOKA_E_INPUT: text, and the model has no tokenizer; TOKA_E_CANCELLED, by the callback or toka_cancel. All these
 * leave the toka usable; TOKA_E_DEVICE does not. Thread: any; whoever waits drives the engine for all, so fn may run on another's
 * thread. */
int toka_generate(toka *t, const toka_request *request, toka_event_fn *fn, void *user, toka_usage *usage, toka_err *e);

/* Queues a request; all it points to is copied. Events come while some thread drives. *id is for toka_cancel; NULL: not wanted.
 * Errors: TOKA_E_USE and TOKA_E_INPUT as toka_generate's, and TOKA_E_USE beyond 2^28 samples under way; TOKA_E_DEVICE if the
 * device has failed. *id stays as it was then. Thread: any. */
int toka_submit(toka *t, const toka_request *request, toka_event_fn *fn, void *user, int64_t *id, toka_err *e);

/* Ends a request in whatever state it is, with TOKA_CANCELLED events; nothing happens if it has ended. Thread: any. */
void toka_cancel(toka *t, int64_t id);

/* Drives the engine until all requests have ended; forever: until toka_stop. Only error: TOKA_E_DEVICE, the device failed; all
 * requests have had their events then. Thread: any; one drives, the others wait and take over where it leaves. */
int toka_run(toka *t, int forever, toka_err *e);

/* Ends every toka_run(forever), also one that is yet to begin: there is none after this. All else works as before. Requests stay;
 * toka_run(t, 0, e) finishes them, toka_close cancels them. Thread: any. */
void toka_stop(toka *t);

typedef struct toka_stats { /* since toka_open, as of the last step. What had an event is counted before it */
    int running, waiting;           /* samples */
    int kv_pages, kv_pages_used;    /* of the KV pools, of 16 tokens each on a CPU, 64 on a GPU; used: held by running samples */
    int64_t steps, rows;            /* forward steps; tokens that went through them */
    int64_t output_tokens;          /* also those without an event, of samples that a callback ended in the middle of a step */
    int64_t requests_done, preemptions;
    int64_t prompt_tokens;          /* of all samples that started */
    int64_t prompt_tokens_shared;   /* of these, found in the prefix tree: not computed again */
    int64_t attended, attended_shared; /* pairs of a row and a position it attends to; of these, in shared prefixes */
    double plan_s, run_s, commit_s; /* where the time went: planning, the device, events. Planning and events go on while the
                                       device runs, where steps run ahead. The device: a replica's first rank had a step, its
                                       waits for other ranks in it count; the mean of all replicas */
} toka_stats;

/* Thread: any, in callbacks too. */
toka_stats toka_get_stats(toka *t);

/* Log-probability of every token of a text given those before it: logprobs[i] for ids[i], i from 1; logprobs[0] is 0. n_ids: 1 to
 * max_model_len, else TOKA_E_USE. logprobs: caller's, n_ids floats; an error leaves it as it was, a device that failed on the way
 * only from some place on. A request like others (n 0, prompt_logprobs), computed in chunks: never holds [tokens][vocabulary].
 * Errors and threads as toka_generate's. */
int toka_score(toka *t, const int32_t *ids, size_t n_ids, float *logprobs, toka_err *e);

/* main() of the toka program. Returns the exit status: 0, 1, 2, or 130 after Ctrl-C. Installs handlers for SIGINT, SIGTERM
 * and SIGBUS and ignores SIGPIPE and SIGXFSZ, so it is for programs that are nothing else. */
int toka_main(int argc, char **argv);

/* ============================================================================================================= */
#ifdef TOKA_INTERNAL
/* The backend boundary: one table of functions, two instances, toka_cpu in toka.c and toka_cuda in toka_kernels.cu.
 *
 * Dimension letters, equal everywhere: T tokens this step, S sequences, L layers, H query heads, K kv heads, D head size,
 * E model width, F mlp width, V vocabulary, B tokens per page. All matrices are row-major; a weight is [outputs][inputs].
 *
 * Ops latch their first failure in the device; the engine reads it once per step by status(). */

typedef struct toka_dev_ptr { /* an address on a device; on the CPU a plain pointer. A struct, so that C cannot dereference it */
    uint64_t at;
} toka_dev_ptr;

typedef enum toka_dtype { TOKA_BF16, TOKA_F16, TOKA_F32 } toka_dtype;

typedef struct toka_tensor { /* a weight, or a slice of one, as it lies in the mapped file, at any byte: not aligned; rows 0: not
                                there */
    const void *data;        /* [rows][cols] */
    toka_dtype dtype;
    int rows, cols;
    int stride;              /* elements from row to row; cols where rows lie side by side */
} toka_tensor;

typedef struct toka_layer {
    toka_tensor attn_norm;               /* [1][E] */
    toka_tensor q, k, v;                 /* [H*D][E], [K*D][E], [K*D][E] */
    toka_tensor q_bias, k_bias, v_bias;  /* [1][H*D], [1][K*D], [1][K*D] or absent */
    toka_tensor q_norm, k_norm;          /* [1][D] RMSNorm over each head (Qwen3) or absent */
    toka_tensor o, o_bias;               /* [E][H*D]; [1][E] or absent */
    toka_tensor mlp_norm;                /* [1][E] */
    toka_tensor gate, up, down;          /* [F][E], [F][E], [E][F] */
    int window;                          /* sliding window: a token sees itself and window-1 before it; 0: all */
} toka_layer;

typedef struct toka_weights {
    toka_tensor embed;    /* [V][E], in the first stage */
    toka_tensor norm;     /* [1][E], in the last stage */
    toka_tensor lm_head;  /* [V][E], in the last stage; the embedding again if tied */
    toka_layer *layers;   /* [L] */
} toka_weights;

/* Many ranks. A model that is spread over devices is a grid of pp stages x tp ranks. A stage has some of the layers, one behind
 * another; its tp ranks have each some of the heads, of the MLP's columns and of the vocabulary. L, H, K, F and V are those of
 * the rank; E, D, B and the rest are equal everywhere. A model on one device is one rank that has all. */
enum { TOKA_ID_BLOCK = 256 };

typedef struct toka_shape {
    int L, H, K, D, E, F, V;
    int v0, V_all;          /* the rank has the ids v0 .. v0+V-1 of V_all; v0 is a multiple of TOKA_ID_BLOCK where V_all is that
                               many for each tp rank */
    int B;                  /* tokens per page */
    float eps;              /* of every RMSNorm */
    const float *rope_freq; /* [D/2] radians per position: every RoPE kind comes down to this table ... */
    float rope_scale;       /* ... and a factor on cos and sin (yarn), else 1 */
    int max_len;            /* tokens per sequence */
} toka_shape;

/* One piece of attention work: rows row0 .. row0+n_rows-1 of this step against kv positions kv0 .. kv0+n_kv-1, found in
 * pages[page0], the page of kv0, pages[page0+1] ... A row at position p sees only kv positions <= p. Many sequences that share a
 * prefix are one span over that prefix (their rows lie side by side) plus one span each for their own part. For each row the spans
 * cover positions 0 .. p exactly once, in rising kv0. kv0 lies within a page only where the backend allows it. */
typedef struct toka_span {
    int row0, n_rows, page0, kv0, n_kv;
} toka_span;

/* One row whose logits are wanted, and what to do with them. Plain data: pointers are host memory valid for the step. */
typedef struct toka_sample_row {
    int row;                       /* 0 .. T-1 */
    int seq;                      /* of its sequence: the id becomes the slot's last token; -1: not kept */
    int32_t forced_id;             /* >= 0: score this id, draw nothing */
    bool ranked;                   /* with forced_id and sampling: the id's rank is wanted */
    uint32_t sample;               /* sample index and ... */
    uint32_t position;             /* ... position of the token to draw: the counter of the random number */
    const toka_sampling *sampling; /* may be NULL with forced_id */
    const int32_t *history;        /* prompt then output ids, for penalties */
    int n_prompt, n_history;
    const int32_t *forbidden;      /* ids that may not be drawn now (end ids before min_tokens) */
    int n_forbidden;
} toka_sample_row;

/* Is the pick's logprob wanted? Else it is NAN. Of a forced id it always is. */
static inline bool toka_wants_logprob(const toka_sample_row *row) { return row->forced_id >= 0 || row->sampling->logprobs >= 0; }

/* The id to pick where every logit is -inf: the lowest that is allowed and not forbidden; if all that is allowed is forbidden, the
 * lowest allowed. Backends that sample by themselves call it, so that all answer alike. Lists may be as long as the vocabulary: a
 * window of ids at a time. */
static inline int32_t toka_fallback_id(const toka_sample_row *row, int V) {
    enum { WINDOW = 1024 };
    const toka_sampling *sampling = row->sampling;
    bool allowed[WINDOW], forbidden[WINDOW];
    int32_t lowest = sampling->n_allowed ? V : 0;
    for (int i = 0; i < sampling->n_allowed; i++) lowest = sampling->allowed_ids[i] < lowest ? sampling->allowed_ids[i] : lowest;
    for (int from = lowest; from < V; from += WINDOW) {
        for (int i = 0; i < WINDOW; i++) allowed[i] = !sampling->n_allowed, forbidden[i] = false;
        for (int i = 0; i < sampling->n_allowed; i++)
            if (sampling->allowed_ids[i] >= from && sampling->allowed_ids[i] - from < WINDOW) allowed[sampling->allowed_ids[i] - from] = true;
        for (int i = 0; i < row->n_forbidden; i++) /* a model's end ids may lie outside its vocabulary */
            if (row->forbidden[i] >= from && row->forbidden[i] - from < WINDOW) forbidden[row->forbidden[i] - from] = true;
        for (int i = 0; i < WINDOW && from + i < V; i++)
            if (allowed[i] && !forbidden[i]) return from + i;
    }
    return lowest;
}

typedef struct toka_sample_result { /* what came of a toka_sample_row */
    int32_t id;
    float logprob, sampled_logprob;
    int rank;              /* of a ranked row: the id's place by raw logit, 1 is the best, of equal
                              ones the lowest id first; else 0 */
    int n_top;
    int32_t top_ids[TOKA_MAX_LOGPROBS];
    float top_logprobs[TOKA_MAX_LOGPROBS];
} toka_sample_result;

typedef struct toka_copy { /* a whole KV page, in all layers */
    int32_t from, to;
} toka_copy;

typedef struct toka_step {   /* one forward step, the plan as integers; host memory, valid until the step is done */
    int T, n_spans, n_samples;
    const int32_t *ids;      /* [T]; -1 - q: the last token of slot q, which an earlier step drew and the device kept */
    const int32_t *pos;      /* [T] position of each token in its sequence */
    const int32_t *kv_slot;     /* [T] page * B + offset: where its K and V are stored */
    const int32_t *pages;    /* page tables, spans point into it */
    const toka_span *spans;  /* [n_spans] */
    int n_copies;
    const toka_copy *copies; /* [n_copies] done before any K or V of this step is stored; no page is in both columns, none twice in
                                `to` */
    const toka_sample_row *samples; /* [n_out] */
    float *logits;           /* NULL, or [n_out][V_all] host float32: raw logits too (tests, tools) */
    int64_t number;          /* with stages: 1, 2, 3 ... in the order in which the ranks run them */
    int64_t needs_step;           /* with stages: ids -1 - q were drawn in step `needs` or before it, a step with n_out > 0; 0: none */
} toka_step;

typedef struct toka_device toka_device; /* a backend's own state */
typedef struct toka_group toka_group;   /* what the ranks of one model share; a backend's own */

typedef struct toka_device_options {
    int n_threads;   /* CPU: of all n_devices together; 0: one a core */
    int max_tokens;  /* largest T of a step */
    int max_samples;     /* largest n_out */
    int n_pages;     /* KV pages to hold */
    int n_devices;   /* that this process opens beside one another, with this one; 0: 1. Those of one machine share its memory */
    int index;       /* of this one among them */
    int n_seqs;     /* slots whose last tokens the device keeps; 0: none, all ids are given */
    toka_group *group; /* NULL: alone */
    int tp_rank, tp_size, pp_rank, pp_size; /* place in the group; sizes 0 and 1 mean the same */
    double memory_utilization; /* CUDA: share of the free memory that may be taken; 0: 0.9 */
    bool eager;                /* CUDA: nothing is captured, all steps are launched kernel by kernel */
    void (*progress)(void *user, const char *what, double done); /* or NULL; done: 0 to 1; any thread, one at a time */
    void *user;
} toka_device_options;

/* What a device did by its own clock, since its first step, the rehearsal. Every so many steps one is run with the clock read
 * between its ops, too; what these did is counted from the step's integers: bytes are the least that must move. */
enum {
    TOKA_OP_EMBED, TOKA_OP_QKV, TOKA_OP_ATTENTION, TOKA_OP_OUT, TOKA_OP_MLP, TOKA_OP_HEAD,
    TOKA_OP_ALL_REDUCE,     /* over tensor ranks, with what it waits for them; bytes: that leave over its links, but those that
                           leave beside the products */
    TOKA_OP_SEND_RECEIVE, /* from stage to stage: putting x in and taking it out; bytes: the same */
    TOKA_N_OPS
};
typedef struct toka_op_times {
    double seconds, flop, bytes;
} toka_op_times;
typedef struct toka_times {
    int64_t steps, graphs; /* all, and those that were CUDA graphs */
    double busy_s, idle_s; /* in steps; between one and the next, waiting for its upload included: with stages, the bubble */
    double begin_s, end_s; /* of the step finished last, from the begin of the first that counts */
    int64_t n_timed;       /* steps whose parts were timed */
    toka_op_times op[TOKA_N_OPS];
} toka_times;

typedef struct toka_memory { /* of one device, in bytes: what the model takes, the KV pool, and all else that is gone since it was
                                opened */
    int64_t weights, kv, other;
} toka_memory;

typedef struct toka_bench_row { /* one measurement of `toka bench ops` */
    const char *op, *model, *shape; /* valid during the call */
    double us, flop, bytes;         /* of one call of the op; bytes: the least that must move */
} toka_bench_row;
typedef void toka_bench_fn(void *user, const toka_bench_row *row);

typedef struct toka_backend {
    const char *name;
    /* Describes device number i of this kind in one line. Returns 0 when there is none that can be used, with the reason in
     * line. */
    int (*probe)(int i, char *line, size_t bytes);
    /* Devices of this kind that one process can use beside one another; NULL: as many as it wants. */
    int (*count)(void);
    /* Bytes that the KV pool may take beside all the rest of this model and a step of this size, on the device that `o` names
     * (n_pages and the group are not looked at). */
    int64_t (*kv_bytes)(const toka_shape *shape, const toka_weights *weights, const toka_device_options *o);
    /* Takes all memory; keeps `shape` and `weights` by pointer, they outlive the device. */
    int (*open)(toka_device **out, const toka_device_options *o, const toka_shape *shape, const toka_weights *weights,
                toka_err *e);
    void (*close)(toka_device *d);
    const char *(*describe)(const toka_device *d);               /* one line: what it runs on */
    void (*memory)(const toka_device *d, toka_memory *m);        /* any thread, while no step is under way; NULL: not known */
    int (*status)(toka_device *d, toka_err *e);                  /* 0, or the first failure since open */
    toka_dev_ptr (*alloc)(toka_device *d, size_t bytes);             /* at open only; freed by close */
    void (*upload)(toka_device *d, toka_dev_ptr to, const void *from, size_t bytes);
    void (*download)(toka_device *d, void *to, toka_dev_ptr from, size_t bytes);
    /* Ranks. Each rank is a device, driven by one thread; all run the same steps in the same order. An op that waits for other
     * ranks, and open, where the ranks meet, give up when the group is aborted; the op also when nobody gets on for half a minute:
     * then every device of the group latches a failure, with the rank and the op, and further ops do nothing. A device may be
     * closed when its own thread is in no op, the group when its devices are. */
    int (*group_open)(toka_group **out, int tp_size, int pp_size, toka_err *e);
    void (*group_close)(toka_group *g);
    void (*group_abort)(toka_group *g);                         /* any thread */
    /* For who waits for steps that all ranks have: called again and again, by one thread at a time. slept: seconds since the last
     * call; who: a rank that is not done. When no rank got on for half a minute, ends the group and returns the error, which
     * names the rank to blame. */
    int (*group_watchdog)(toka_group *g, int who, double slept, toka_err *e);
    void (*all_reduce)(toka_device *d, toka_dev_ptr x, int rows);   /* x [rows][E] = the sum over the stage's tp ranks, in order */
    void (*send)(toka_device *d, toka_dev_ptr x, int rows);         /* x [rows][E] to the same tp rank of the next stage */
    void (*receive)(toka_device *d, toka_dev_ptr x, int rows);      /* from the stage before */
    /* Steps. Ops may return before their work is done; it is done in the order in which they were called. For each step, on the
     * rank's thread: begin, the ops, end; later finish, step after step in the same order. A step, and the host memory that it
     * names or that its picks go to, stays as it is from begin to the end of finish, which waits until the step is done: its picks
     * are there then. At most n_ahead steps are begun and not finished. finish is called for each that was begun, also after a
     * failure, and also on ranks that have no picks. All three NULL: an op's work is done when it returns. */
    void (*begin)(toka_device *d, const toka_step *s);
    void (*end)(toka_device *d, const toka_step *s);
    void (*finish)(toka_device *d, const toka_step *s);
    /* The next step to go through begin, ops and end, ahead of the first real one, so that it is captured: it runs nothing and is
     * not finished. NULL: that was all; no entry: nothing is captured. */
    const toka_step *(*capture)(toka_device *d);
    void (*times)(toka_device *d, toka_times *times);            /* as of the last finish; NULL: the device has no clock */
    /* s->copies, of this rank's layers; before all other ops of the step */
    void (*copy_pages)(toka_device *d, const toka_step *s);
    /* The transformer. x: [T][E] residual stream (with room for E rounded up to 8, where a backend wants to pad), q and o:
     * [T][H][D], in the backend's own activation type (float32 on the CPU, bf16 on CUDA); `layer` also picks the layer's K
     * and V pages. With tp ranks, embed, out_residual and norm_mlp_residual leave in x this rank's part of a sum, and all_reduce
     * must follow: embed has zeros for ids of other ranks; only tp rank 0 adds to the old x, and the bias. The logits are
     * gathered, so that each tp rank has all picks; raw logits go to tp rank 0's step. With stages, embed is the first's and
     * waits for the draws that its step needs; norm_logits_sample is the last's. */
    void (*embed)(toka_device *d, const toka_step *s, toka_dev_ptr x);                              /* x = embed[ids] */
    void (*norm_qkv_rope_kv)(toka_device *d, const toka_step *s, int layer, toka_dev_ptr x, toka_dev_ptr q); /* K, V to their slots */
    void (*attention)(toka_device *d, const toka_step *s, int layer, toka_dev_ptr q, toka_dev_ptr o);
    void (*out_residual)(toka_device *d, const toka_step *s, int layer, toka_dev_ptr o, toka_dev_ptr x);     /* x += o W_o (+b) */
    void (*norm_mlp_residual)(toka_device *d, const toka_step *s, int layer, toka_dev_ptr x);  /* x += down(silu(gate)*up) */
    /* picks[n_out], host; see finish */
    void (*norm_logits_sample)(toka_device *d, const toka_step *s, toka_dev_ptr x, toka_sample_result *picks);
    /* Measures every op at the shapes of known models, without a model; the first row is the read bandwidth. NULL: not there. */
    int (*bench)(toka_bench_fn *row, void *user, toka_err *e);
    size_t activation_bytes; /* bytes of one element of x, q and o, and of K and V */
    int page_tok;            /* tokens of a KV page: toka_shape.B */
    bool reads_files;        /* ops read weights where files are mapped; else open copies them */
    bool warm_up;           /* the largest step is run once at open: it shows that memory suffices, and loads the code */
    int default_tokens, default_seqs; /* of a step, and running at once, where the user does not say */
    int n_ahead;             /* steps that are posted before the oldest one's picks are looked at, and begun before it is finished;
                                1: each is waited for */
    /* What attention costs here, in tokens of K and V read for one row; decides which shared prefixes become spans of their own:
     * merging one more partial result into a row, one more span, and how many rows one read of K and V serves. */
    int merge_tok, span_tok, tile_rows;
    int span_align_tok; /* a span may begin within a page, at a multiple of this; 0: no */
} toka_backend;

/* ---- What a GPU's memory and steps are: the CUDA backend counts with these before it takes anything, `toka plan` for GPUs that
 * are not there. ---- */

enum { TOKA_GPU_PAGE_TOK = 64,
       TOKA_GPU_MAX_TP = 8,     /* tensor ranks of a stage, at most */
       TOKA_GPU_LINK_BUFFERS = 3,      /* messages between two stages that are under way */
       TOKA_GPU_SCATTER_BYTES = 4 << 20, /* bytes of x from which on products on Hopper send sums over tensor ranks on their way */
       /* of a step: whole waves of 128-row tiles on 132 multiprocessors, for every N that is a multiple of 1,024 */
       TOKA_GPU_MAX_TOKENS = 8448,
       TOKA_GPU_MAX_SEQS = 8192 };

/* A matrix as bf16, rows and columns rounded up to 8 as they lie on the device; 0: not there. */
static inline size_t toka_gpu_matrix_bytes(const toka_tensor *t) {
    return ((size_t)t->rows + 7) / 8 * 8 * (((size_t)t->cols + 7) / 8 * 8) * 2;
}
static inline size_t toka_gpu_layer_bytes(const toka_layer *l) {
    return toka_gpu_matrix_bytes(&l->q) + toka_gpu_matrix_bytes(&l->k) + toka_gpu_matrix_bytes(&l->v) +
           toka_gpu_matrix_bytes(&l->o) + toka_gpu_matrix_bytes(&l->gate) + toka_gpu_matrix_bytes(&l->up) +
           toka_gpu_matrix_bytes(&l->down);
}
/* What all but the weights and the KV pool takes, with what the driver and the libraries' code take. */
static inline size_t toka_gpu_scratch_bytes(const toka_shape *shape, int max_tokens) {
    size_t heads = (size_t)(shape->H + 2 * shape->K) * shape->D, row = 2 * (size_t)shape->E + 2 * (size_t)shape->H * shape->D + heads + shape->F;
    size_t attention = (size_t)shape->H * (shape->D + 1) * 4; /* of a row: what earlier spans left, float32 */
    return (size_t)max_tokens * (row * 2 + attention) + (size_t)shape->max_len * shape->D / 2 * 8 + ((size_t)1536 << 20);
}
/* And what ranks need for one another: sums and samples of a stage's tensor ranks, messages between stages. */
static inline size_t toka_gpu_group_bytes(const toka_shape *shape, int max_tokens, int tp, int pp) {
    size_t x = (size_t)max_tokens * (((size_t)shape->E + 7) / 8 * 8) * 2;
    return (tp > 1 ? x + ((size_t)256 << 20) : 0) + (pp > 1 ? (TOKA_GPU_LINK_BUFFERS + 1) * x : 0);
}
/* Share of the free memory that is taken where nobody says. */
static inline double toka_gpu_utilization(double asked) { return asked > 0 ? asked : 0.9; }

extern const toka_backend toka_cpu;
#ifdef TOKA_WITH_CUDA
extern const toka_backend toka_cuda;
#endif
#endif /* TOKA_INTERNAL */

#ifdef __cplusplus
}
#endif
#endif
