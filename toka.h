/* toka.h - toka, a high-throughput LLM inference engine in one C file.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Upper half: the public API. A program that links toka.o needs nothing else.
 * Lower half: the backend boundary of toka.c and toka_kernels.cu (which define TOKA_INTERNAL).
 *
 * The smallest program:
 *
 *     toka *t; toka_err e;
 *     toka_options o = toka_options_default();
 *     o.model = "path/to/model";
 *     if (toka_open(&t, &o, &e)) { fprintf(stderr, "%s\n", e.msg); return 1; }
 *     toka_request r = toka_request_default();
 *     r.text = "Once upon a time"; r.text_bytes = 16; r.sampling.max_tokens = 64;
 *     toka_generate(t, &r, on_event, NULL, NULL, &e);   // calls on_event for every token
 *     toka_close(t);
 *
 * Conventions.
 *   Errors   A function that can fail returns 0 or a negative toka_code. It fills *e with one
 *            sentence; e must not be NULL. If memory for something small cannot be allocated, the
 *            process is aborted.
 *   Text     UTF-8, passed as pointer and number of bytes.
 *   Memory   Arguments are borrowed for the call. Each function that returns memory says who frees
 *            it.
 *   Units    Lengths are in tokens unless the name says _bytes. Token ids are int32.
 *            Log-probabilities are natural logarithms, float32.
 *   Threads  "Thread: any" means any thread, also several at the same time.
 *   Words    A request is a prompt with n samples. Each sample is one output, which the engine
 *            computes as one sequence. A step is one forward pass over rows (tokens) of many
 *            sequences. The driver is the thread that runs steps and calls callbacks: any thread in
 *            toka_generate, toka_run or toka_score, one at a time. */
#ifndef TOKA_H
#define TOKA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef TOKA_INTERNAL
#include <pthread.h>
#include <string.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define TOKA_VERSION "0.2.0"

/* ---- Errors -------------------------------------------------------------------------------- */

typedef enum toka_code {
    TOKA_OK = 0,
    TOKA_E_USE = -1,      /* a wrong argument, option, flag or request */
    TOKA_E_INPUT = -2,    /* a file or text that is broken, hostile or not supported */
    TOKA_E_IO = -3,       /* the operating system refused: open, read, write, map */
    TOKA_E_DEVICE = -4,   /* the device refused or failed */
    TOKA_E_MEMORY = -5,   /* not enough memory for what was requested */
    TOKA_E_CANCELLED = -6 /* a callback or toka_cancel ended the request */
} toka_code;

typedef struct toka_err {
    int code;      /* toka_code */
    char msg[500]; /* one sentence without a final period: what, where, found, expected */
} toka_err;

/* ---- Opening a model ----------------------------------------------------------------------- */

typedef struct toka toka; /* an open model: its tokenizer, chat template, devices and engine */

typedef struct toka_options {
    const char *model;         /* a folder in Hugging Face layout, a hub id that is in the local hub
                                  cache, or a name of models.txt; NULL: the model that is embedded
                                  in the program, if it was built with one */
    const char *models_file;   /* models.txt, for names of models; NULL: the file beside the
                                  program, or ./models.txt */
    const char *chat_template; /* a file with a Jinja template, or the name of one of the model's
                                  templates, such as rag; NULL: the model's "default", and its
                                  "tool_use" for chats with tools */
    const char *device;        /* "auto", "cpu", "cuda", or "plain" (slow code that every other
                                  device is compared with; auto never takes it); NULL: auto */
    int n_threads;             /* threads of the CPU backend, all its devices together, at most
                                  1,024; 0: one per core */
    int max_model_len;         /* longest sequence (prompt and output), tokens; 0: the model's own
                                  limit, lowered to what fits in memory */
    int max_num_batched_tokens; /* most tokens in one step; 0: the backend's default */
    int max_num_seqs;           /* most sequences that run at once; 0: the backend's default */
    int tensor_parallel_size;   /* devices that share the heads and MLP columns of each layer, and
                                   the vocabulary; 0: 1 */
    int pipeline_parallel_size; /* stages; each has some of the layers, on its own devices; 0: 1 */
    int data_parallel_size;     /* replicas of the whole model. Each has its own devices, steps,
                                   sequences and KV cache, of the sizes given here; 0: 1 */
    int64_t kv_tokens;          /* size of the KV cache, tokens, 2 or more; 0: what memory has */
    bool no_prefix_caching;     /* turns prefix sharing off, in the KV cache and in attention: every
                                   sample computes its whole prompt. Results do not change; use it
                                   to measure what sharing saves */
    bool enforce_eager;         /* GPU: launches every step kernel by kernel, without CUDA graphs */
    bool enable_sleep_mode;     /* GPU: toka_sleep and toka_update_weights work; on the CPU they
                                   always do */
    double gpu_memory_utilization; /* share of the GPU's free memory that may be allocated, in
                                      (0,1]; 0: 0.9 */
    const char *dtype; /* arithmetic of matrix products: "float32" (CPU only), "bfloat16" or "auto"
                          (float32 on the CPU, bfloat16 on a GPU); NULL: auto. bfloat16 rounds their
                          inputs to bf16 and adds in float32; on a CPU it needs AVX512_BF16 */
    const char *quantization; /* "fp8": the plain matrices of the layers become FP8 when the model is
                                 opened, with one scale a row; routers, embedding and LM head stay.
                                 NULL: the weights stay as in the files */
    const char *score_tokens; /* "YES,NO": two tokens of a reranker, for /v1/score and /v1/rerank of
                                 toka_main; NULL: what modules.json says */
    const char *kv_cache_dtype; /* "fp8" or "fp8_e4m3": K and V are stored as FP8, with one scale
                                   for each token and head. "auto": float32 on the CPU, bf16 on a
                                   GPU; NULL: auto */
    const char *kv_cache_dtype_skip_layers; /* with FP8: layers whose K and V stay as with auto.
                                   Their numbers from 0 on, or "sliding_window" for all layers with
                                   a window, separated by commas; NULL: none */
    const char *speculative_config; /* speculative decoding, a JSON object as vLLM's, such as
                                   {"method":"ngram","num_speculative_tokens":4}; chapter 20 of
                                   toka.c has the methods and options. No token and no
                                   log-probability changes. Not on a GPU. NULL: none */
    int num_speculative_tokens;  /* 1 to 16: most drafts of a sequence in a step. 0: what
                                   speculative_config says. Alone it means method ngram */
    const char *draft_model;  /* a smaller model with the same tokenizer makes the drafts, as with
                                   {"method":"draft_model","model":"..."}; a folder or name, as
                                   `model`, or the head's with method eagle3. NULL: what
                                   speculative_config says */
    bool enable_return_routed_experts; /* keeps the experts of each token in the KV cache, for
                                          toka_routed_experts. Not on a GPU */
    int max_loras;     /* most adapters (LoRA) that may be loaded at once, at most 64; 0: none */
    int max_lora_rank; /* highest rank of an adapter, at most 512; 0: 512 */
    /* Called while toka_open works, on any thread, one call at a time; may be NULL. what: the
     * phase; done: 0 to 1. */
    void (*progress)(void *user, const char *what, double done);
    void *progress_user; /* passed to progress as `user` */
} toka_options;

/* Returns options with all fields at their defaults. Thread: any. */
toka_options toka_options_default(void);

/* Opens a model: maps its files, checks every shape, allocates all memory. *out is owned by the
 * caller until toka_close; it is NULL after an error. The options are read during the call only.
 * Several models may be open at the same time, or one model several times; on a GPU each allocates
 * its share of the memory that the others left free.
 * The weight files stay mapped, and the CPU reads the weights there. If a file is truncated
 * meanwhile, or its disk fails, the thread that reads it gets SIGBUS; only toka_main handles that
 * signal. To replace a file, rename the new file over it.
 * Returns TOKA_E_USE, TOKA_E_INPUT, TOKA_E_IO, TOKA_E_DEVICE or TOKA_E_MEMORY. Thread: any. */
int toka_open(toka **out, const toka_options *options, toka_err *e);

/* Closes the model and frees its memory; t may be NULL. No other call on t may be in progress.
 * Requests that have not ended get their last events, TOKA_CANCELLED, on this thread; a toka_submit
 * in these callbacks returns TOKA_E_CANCELLED. If a device hangs, memory that it may still use is
 * not freed. Thread: any, but not in a callback. */
void toka_close(toka *t);

/* What was opened. The strings are owned by t and live as long as t. */
typedef struct toka_info {
    const char *model_name;   /* last part of the folder's path, hub id, or name of models.txt */
    const char *architecture; /* as in config.json */
    const char *device;       /* one line that describes the device */
    int64_t n_parameters;
    int n_layers;
    int n_heads, n_kv_heads;  /* query heads; key/value heads */
    int head_size, width, mlp_width; /* elements of: a head, the residual stream, the MLP inside */
    int vocab_size;           /* valid ids are 0 .. vocab_size-1, in prompts and outputs */
    int max_model_len;        /* most tokens of a sequence, prompt and output together */
    int bos_id, eos_id;       /* -1: none. If a model has several end ids, eos_id is the first; each
                                 of them ends a sample */
    int has_chat_template;    /* 1: there is a valid chat template; one that is only for chats with
                                 tools does not count. Else 0 */
    const char *not_on_gpu;   /* device auto found a GPU that cannot run this model: a sentence that
                                 says why; else NULL */
    const char *no_drafts;    /* speculative decoding was asked for, but this model has none: a
                                 sentence that says why; else NULL */
    int n_routed;             /* experts of a token and layer that toka_routed_experts gives; 0:
                                 enable_return_routed_experts is not set */
} toka_info;

/* Thread: any. */
toka_info toka_get_info(const toka *t);

/* ---- Text and tokens ------------------------------------------------------------------------
 * Thread: any, also in callbacks. After an error the outputs are unchanged. */

enum {
    TOKA_ADD_SPECIAL = 1,   /* encode: add the tokens that the tokenizer adds around a text (usually
                               the begin token) */
    TOKA_PARSE_SPECIAL = 2, /* encode: the text of a special token becomes that token. Leave it off
                               for untrusted text */
    TOKA_SKIP_SPECIAL = 4   /* decode: leave special tokens out */
};

/* Converts text to ids. *ids: [*n_ids], malloc'ed, the caller frees it; never NULL after success.
 * flags: TOKA_ADD_SPECIAL, TOKA_PARSE_SPECIAL. text may be NULL if text_bytes is 0. Invalid UTF-8
 * bytes are read as U+FFFD.
 * Returns TOKA_E_INPUT if the model has no tokenizer.json, TOKA_E_USE for 2 GiB of text or more. */
int toka_encode(const toka *t, const char *text, size_t text_bytes, int flags, int32_t **ids,
                size_t *n_ids, toka_err *e);

/* Converts ids to text. *text is malloc'ed and NUL-terminated, the caller frees it; *text_bytes
 * does not count the NUL. flags: TOKA_SKIP_SPECIAL. ids: [n_ids], may be NULL if n_ids is 0.
 * Returns TOKA_E_INPUT if the model has no tokenizer.json, TOKA_E_USE if the tokenizer does not
 * have an id. */
int toka_decode(const toka *t, const int32_t *ids, size_t n_ids, int flags, char **text,
                size_t *text_bytes, toka_err *e);

/* Renders the chat template. context: a JSON object with "messages", "tools",
 * "add_generation_prompt" (default false) and other arguments of the template (enable_thinking
 * ...). The template decides which of them it needs, even for "messages". now: "YYYY-MM-DD
 * hh:mm:ss", for strftime_now in the template; NULL: the local time. *text is malloc'ed and
 * NUL-terminated, the caller frees it; *text_bytes does not count the NUL. The text contains the
 * special tokens, also the begin token if the template writes it: encode it with TOKA_PARSE_SPECIAL
 * only.
 * Returns TOKA_E_USE if the model has no template, context is not an object, or now has another
 * form; TOKA_E_INPUT if context is not JSON, or the template is invalid or fails on it. */
int toka_apply_chat_template(const toka *t, const char *context, size_t context_bytes,
                             const char *now, char **text, size_t *text_bytes, toka_err *e);

/* ---- Requests ------------------------------------------------------------------------------- */

/* Bad words: texts that must not appear in an output. A token that would complete one of them is
 * forbidden, with or without a space before the word, and no matter how its beginning was split
 * into tokens. A longer word that contains it is allowed if it is one token (`class` for `ass`). */
typedef struct toka_words toka_words;

/* Looks up n bad words in the vocabulary of t: n is 1 to 2,048, of at most 32,768 bytes in all.
 * Spaces before a text are ignored. It reads the whole vocabulary, so use one list for many
 * requests. *out is owned by the caller until toka_words_del, which may come after toka_close and
 * after toka_submit, because a request keeps what it needs. *out is NULL after an error.
 * Returns TOKA_E_USE if n or the sizes are out of range, or a text has no tokens; TOKA_E_INPUT if
 * the model has no tokenizer.json. Thread: any. */
int toka_words_new(toka_words **out, const toka *t, const char *const *words, int n, toka_err *e);

/* Frees a list; w may be NULL. Thread: any. */
void toka_words_del(toka_words *w);

/* A constraint: the texts that an output may be. Tokens that lead to no such text are not drawn. An
 * end id may be drawn where the text is complete; if nothing can follow the text, the sample ends
 * (TOKA_STOP) without one. */
typedef struct toka_constraint toka_constraint;

enum { /* toka_grammar.kind */
    TOKA_GRAMMAR_JSON_SCHEMA = 1, /* text: a JSON Schema; an output is a JSON text valid for it */
    TOKA_GRAMMAR_JSON_OBJECT,     /* any JSON object; text is not read */
    TOKA_GRAMMAR_CHOICE,          /* text: a JSON array of strings; an output is one of them */
    TOKA_GRAMMAR_REGEX,           /* text: a regular expression that matches the whole output */
    TOKA_GRAMMAR_GBNF,            /* text: rules `name ::= ...`, as llama.cpp's and xgrammar's,
                                     or Lark's: `name: ...` */
    TOKA_GRAMMAR_STRUCTURE        /* text: a tree of elements as JSON, such as fixed texts, schemas
                                     and reasoning; chapter 26 of toka.c lists them */
};

typedef struct toka_grammar { /* borrowed during the call only */
    int kind;
    const char *text;
    size_t text_bytes;
    /* of JSON: */
    int no_whitespace;  /* 1: no white space. 0: between two tokens of JSON there may be one blank,
                           or a line end and at most 40 blanks or tabs */
    int no_additional;  /* 1: objects with `properties` but no additionalProperties have no other
                           properties */
    const char *whitespace_pattern; /* NULL, or a regular expression for white space between two
                                       tokens of JSON */
    int (*stop)(void *stop_user); /* NULL, or is called every millisecond or so, on the thread that
                                     compiles. Not 0: toka_constraint_new returns
                                     TOKA_E_CANCELLED */
    void *stop_user;
} toka_grammar;

/* Compiles a grammar for the vocabulary of t. It may take some milliseconds, for a large schema
 * more. t keeps the last ones, and a second call with the same grammar gets the same constraint.
 * One constraint may serve many requests at once. *out is owned by the caller until
 * toka_constraint_del, which may come after toka_close and after toka_submit, because a request
 * keeps what it needs. *out is NULL after an error. Returns TOKA_E_USE if the grammar is wrong,
 * uses a feature that is not supported (the message names it), or takes too long to compile (some
 * seconds); TOKA_E_INPUT if the model has no tokenizer.json; TOKA_E_CANCELLED if `stop` ended it.
 * Thread: any. */
int toka_constraint_new(toka_constraint **out, const toka *t, const toka_grammar *grammar,
                        toka_err *e);

/* Drops a constraint; c may be NULL. Thread: any. */
void toka_constraint_del(toka_constraint *c);

/* Sampling parameters. They are applied to the logits in this order, as in Hugging Face:
 * logit_bias; allowed ids and the constraint; repetition, presence and frequency penalty;
 * min_tokens and bad words (these forbid ids); temperature; top-k; top-p; min-p; then the draw. */
typedef struct toka_sampling {
    float temperature;        /* 0: greedy, the id with the highest logit, on a tie the lowest id */
    float top_p;              /* in (0,1]; 1: off */
    float min_p;              /* in [0,1]; 0: off */
    int top_k;                /* 0 or -1: off */
    float repetition_penalty; /* 0.01 to 100; 1: off; counts prompt and output */
    float presence_penalty;   /* -2 to 2; 0: off; counts the output */
    float frequency_penalty;  /* -2 to 2; 0: off; counts the output */
    uint64_t seed;            /* a draw is a pure function of (seed, sample index, position) */
    int max_tokens;           /* most output tokens; 0, or too large: what max_model_len leaves */
    int min_tokens;           /* in the first min_tokens tokens, end ids are forbidden and stop
                                 strings do not end the sample */
    int ignore_eos;           /* 1: end ids of the model do not end the sample */
    int logprobs;             /* k of the top-k log-probabilities of each token, at most
                                 TOKA_MAX_LOGPROBS; 0: only the sampled token's; TOKA_NO_LOGPROBS:
                                 not even that, which saves work. It does not change what is
                                 drawn */
    const int32_t *stop_ids;  /* [n_stop_ids]: each of these ids ends the sample */
    int n_stop_ids;
    const char *const *stop;  /* [n_stop], at most 256 texts of 1 to 4,096 bytes: each of them ends
                                 the sample, also if it is spread over several tokens */
    int n_stop;
    int include_stop;         /* 1: the text of the stop string, or of the id that ends the sample,
                                 is part of the output */
    const int32_t *bias_ids;  /* [n_bias] logit_bias: adds bias_values[i] to the logit of
                                 bias_ids[i] */
    const float *bias_values; /* [n_bias], -100 to 100 */
    int n_bias;
    const int32_t *allowed_ids; /* [n_allowed]: only these ids may be drawn; n_allowed 0: all */
    int n_allowed;
    const int32_t *bad_ids;   /* bad words as n_bad sequences of ids, one after the other; sequence
                                 i has bad_lengths[i] ids, at least 1, at most 262,144 in all.
                                 Its last id is forbidden if the output ends in the ids before it */
    const int *bad_lengths;   /* [n_bad] */
    int n_bad;
    toka_words *bad_words;    /* bad words as texts (toka_words_new); NULL: none */
    toka_constraint *constraint; /* toka_constraint_new; NULL: none */
    int max_thinking;         /* most output tokens in the `thinking` of a constraint that is a
                                 TOKA_GRAMMAR_STRUCTURE: then its end is all that may be drawn; 0:
                                 no limit; negative: none */
} toka_sampling;

#define TOKA_MAX_LOGPROBS 100 /* largest toka_sampling.logprobs and toka_request.prompt_top */
#define TOKA_NO_LOGPROBS (-1) /* toka_sampling.logprobs: event.logprob is not needed */

typedef struct toka_request { /* all pointers are borrowed during the call only */
    const char *text;      /* the prompt as text; may be NULL if text_bytes is 0 ... */
    size_t text_bytes;
    int text_flags;        /* flags of toka_encode. With TOKA_ADD_SPECIAL an empty text is a prompt
                              of one begin token, if the model has one */
    const int32_t *ids;    /* ... or the prompt as ids, [n_ids], if not NULL */
    size_t n_ids;
    int n;                 /* number of samples, at most 1 << 20; they are numbered from 0. 0: only
                              the prompt is computed; this needs prompt_logprobs or pooling */
    toka_sampling sampling;
    int prompt_logprobs;   /* 1: one event of sample TOKA_PROMPT for each token of the prompt, in
                              order, before the first event of sample 0. Sample 0 then computes its
                              whole prompt, without the prefix cache */
    int prompt_top;        /* with prompt_logprobs: k of the top-k log-probabilities per token */
    int prompt_ranks;      /* 1, with prompt_logprobs: the rank of each token, too; this reads all
                              logits of the row */
    int keep_special;      /* 1: special tokens stay in the text; those that end a sample only with
                              include_stop */
    int ids_only;          /* 1: events have no text (NULL), unless there are stop strings, for
                              which the engine needs the text: the caller decodes the ids */
    int priority;          /* a head start in the queue: higher is earlier, 0 is normal. One level
                              counts as much as 1,024 steps of waiting */
    uint64_t length_class; /* nothing reads it */
    int pooling;           /* toka_pooling; not TOKA_POOL_NONE: the request is an embedding. Its
                              only event is its end, and that event has the vector. Needs n 0, no
                              prompt_logprobs, and a device that has pooling: cpu or plain */
    int dimensions;        /* with pooling: only the first elements of the vector are kept
                              (Matryoshka); 0: all */
    int normalize;         /* with pooling: 1: the vector, after dimensions, is divided by its L2
                              norm */
    const int32_t *output_ids; /* [n_output_ids] for measurements: each draw is made, and then
                              replaced by the id at its place, in each sample; max_tokens is at most
                              n_output_ids. Log-probabilities are those of the draws. Not with a
                              constraint. NULL: none */
    int n_output_ids;
    const char *adapter;   /* name of a loaded adapter (toka_load_adapter) that the model is run
                              with; NULL: the model as it is */
} toka_request;

/* How an embedding is made of the hidden states of a prompt's tokens, after the final norm. MEAN
 * and CLS need tokens that the prefix cache does not have, so such a request computes its whole
 * prompt; LAST uses the prefix cache. */
typedef enum toka_pooling {
    TOKA_POOL_NONE = 0,
    TOKA_POOL_LAST, /* that of the last token */
    TOKA_POOL_MEAN, /* their mean */
    TOKA_POOL_CLS   /* that of the first token */
} toka_pooling;

/* Returns a request with no prompt yet, one sample, temperature 1, no truncation, seed 0, and
 * text_flags TOKA_ADD_SPECIAL | TOKA_PARSE_SPECIAL. Thread: any. */
toka_request toka_request_default(void);

/* Makes r an embedding as the model's folder defines it: sets n to 0, prompt_logprobs to 0, and
 * pooling, dimensions and normalize by modules.json and the Pooling and Normalize modules of
 * sentence-transformers, and by truncate_dim of config_sentence_transformers.json. Without these
 * files: the last token, normalized. Returns TOKA_E_INPUT if the folder defines what toka does not
 * compute (the message names it), TOKA_E_USE if the device has no embeddings. Thread: any. */
int toka_request_embedding(const toka *t, toka_request *r, toka_err *e);

/* Sets the fields that the model's generation_config.json sets: temperature (0 if do_sample is
 * false), top_p, top_k, min_p, repetition_penalty, max_tokens (max_new_tokens), min_tokens
 * (min_new_tokens), stop (stop_strings), bad_ids (bad_words_ids). Other fields do not change. The
 * arrays of stop and bad_ids are owned by t. t NULL: does nothing. Thread: any. */
void toka_request_model_defaults(const toka *t, toka_request *r);

typedef enum toka_finish {
    TOKA_RUNNING = 0, /* more events will come */
    TOKA_STOP,        /* an end id, stop id or stop string; the constraint's text is complete and
                         nothing can follow; or, with id -1, no id was left that may be drawn */
    TOKA_LENGTH,      /* max_tokens or max_model_len; the end of a prompt without samples; or, with
                         id -1, the constraint's text is not complete, but no id was left */
    TOKA_CANCELLED,   /* by a callback, toka_cancel or toka_close */
    TOKA_FAILED       /* the device failed; toka_run returns the error */
} toka_finish;

enum { TOKA_PROMPT = -1 }; /* toka_event.sample of the events for tokens of the prompt */

typedef struct toka_event { /* one token of one sample; pointers are valid in the callback only */
    int sample;             /* 0 .. n-1, or TOKA_PROMPT */
    int32_t id;             /* the token; -1: none, because the sample was cancelled or failed, or
                               no id was left that may be drawn */
    float logprob;          /* log-softmax of the raw logits, at id. 0 for the first token of a
                               prompt, which has no logits; NAN for a token drawn with
                               TOKA_NO_LOGPROBS */
    float sampled_logprob;  /* the same after penalties, temperature and truncation, which is the
                               distribution that id was drawn from. Also with TOKA_NO_LOGPROBS */
    int n_top;              /* sampling.logprobs, or prompt_top for the prompt; 0 for the first
                               token of a prompt, and with TOKA_NO_LOGPROBS */
    const int32_t *top_ids;      /* [n_top] ids with the highest raw logits, the highest first */
    const float *top_logprobs;   /* [n_top] their log-probabilities */
    int rank;               /* with prompt_ranks: rank of the prompt's id by raw logit, 1 is the
                               highest, of equal ones the lowest id first. Else 0, also for the
                               first token of a prompt */
    const char *text;       /* text that became final with this token: whole characters, never the
                               beginning of what may become a stop string. May be NULL if text_bytes
                               is 0; prompts have no text */
    size_t text_bytes;
    toka_finish finish;
    int stop_id;            /* the id that ended the sample; -1: none did */
    int stop_text;          /* index in sampling.stop of the text that ended it; -1: none did */
    int n_cached;           /* tokens of its prompt that the sample found in the prefix cache when
                               it started */
    int more;               /* 1: another event of this request follows at once, so work that costs
                               per call (a write, a flush) can wait for an event with 0 */
    const float *vector;    /* [n_vector] of an embedding's last event, if its finish is
                               TOKA_LENGTH; else NULL */
    int n_vector;           /* the model's width, or toka_request.dimensions */
    int version;            /* of the weights that computed the token: 0, or the number of
                               toka_update_weights that had succeeded */
} toka_event;

/* A callback for the events of a request; user is the pointer given with the request. Where a
 * function takes a toka_event_fn, NULL means that no events are wanted. Every sample (with n 0: the
 * prompt) ends in exactly one event whose finish is not TOKA_RUNNING. Returns 0 to go on;
 * TOKA_END_SAMPLE: the event's sample ends with this token, and there is no other event about it;
 * any other value cancels the rest of the request.
 * Thread: the driver, between steps; the last events may come in toka_close. All requests wait for
 * it, so it must be quick. It must not call toka_run, toka_generate, toka_score or toka_close; all
 * other functions are allowed. */
typedef int toka_event_fn(void *user, const toka_event *event);
enum { TOKA_END_SAMPLE = -2 };

/* For RL that replays the router's choices. In the callback of an event of a sample: copies the
 * experts that its tokens used, from token number `from` of the sequence on, to
 * experts [n - from][n_layers][n_routed] (toka_info), the ids of a layer in rising order; a layer
 * without experts has zeros. Returns n: the tokens of the prompt and of the output, without the
 * token of this event, which no layer has seen yet. 0: the sample has no token yet, or it waits for
 * memory (after a cancel). experts NULL: only returns n. Thread: the callback's. */
int toka_routed_experts(const toka *t, int from, int16_t *experts);

typedef struct toka_usage {
    int64_t prompt_tokens, output_tokens; /* prompt counted once; output summed over samples */
    double prefill_s; /* seconds from submit to the first token of any sample */
    double decode_s;  /* seconds from there to the end */
} toka_usage;

/* Runs one request to its end, together with all other requests. usage may be NULL; it is filled
 * unless the request is refused.
 * Returns TOKA_E_USE if a field is out of range, if the prompt has no tokens or more than
 * max_model_len - 1 (with n 0: max_model_len), or if more than 2^28 samples would be waiting or
 * running; TOKA_E_INPUT if the prompt is text and the model has no tokenizer, or if no adapter of
 * that name is loaded; TOKA_E_CANCELLED if a callback, toka_cancel or Ctrl-C (toka_main) ended it;
 * TOKA_E_DEVICE if the device failed: after that no request can run on t.
 * Thread: any. Of several threads that wait, one drives the engine for all, so fn may be called on
 * another thread than this one. */
int toka_generate(toka *t, const toka_request *request, toka_event_fn *fn, void *user,
                  toka_usage *usage, toka_err *e);

/* Checks what needs no model: the number of samples and the sampling parameters, but not bad_words
 * and constraint. Returns 0, or TOKA_E_USE as toka_submit would. Thread: any. */
int toka_check_request(const toka_request *request, toka_err *e);

/* Queues a request; everything it points to is copied. Its events come while some thread drives the
 * engine. *id is the argument for toka_cancel; id may be NULL. After an error *id is unchanged.
 * Returns TOKA_E_USE and TOKA_E_INPUT as toka_generate does, TOKA_E_DEVICE if the device has
 * failed, TOKA_E_CANCELLED during toka_close. Thread: any. */
int toka_submit(toka *t, const toka_request *request, toka_event_fn *fn, void *user, int64_t *id,
                toka_err *e);

/* Cancels a request, waiting or running: its samples end with TOKA_CANCELLED events. Does nothing
 * if it has ended. Thread: any. */
void toka_cancel(toka *t, int64_t id);

/* Drives the engine until all requests have ended; forever not 0: until toka_stop. Returns 0, or
 * TOKA_E_DEVICE if the device failed; all requests have had their last events then. Thread: any.
 * One thread drives, the others wait, and one of them takes over when it returns. */
int toka_run(toka *t, int forever, toka_err *e);

/* Makes every toka_run(forever) return, and every later one at once. Everything else works as
 * before. Requests stay: toka_run(t, 0, e) finishes them, toka_close cancels them. Thread: any. */
void toka_stop(toka *t);

typedef struct toka_stats { /* since toka_open, as of the last step. An event is counted before its
                               callback is called */
    int running, waiting;   /* samples */
    int kv_pages;           /* pages of all KV pools; a page has 16 tokens on a CPU, 64 on a GPU */
    int kv_pages_used;      /* pages that running samples hold */
    int64_t steps;          /* forward steps */
    int64_t rows;           /* tokens computed in these steps */
    int64_t output_tokens;  /* includes tokens without an event: a callback ended the sample in the
                               middle of a step */
    int64_t requests_done, preemptions;
    int64_t prompt_tokens;         /* of all samples that started */
    int64_t prompt_tokens_shared;  /* of these, found in the prefix cache and not computed again */
    int64_t attended;        /* pairs of a row and a position that it attends to */
    int64_t attended_shared; /* of these, in shared prefixes */
    int64_t drafts;          /* drafts of one or more tokens that were verified (vLLM's counts) */
    int64_t draft_tokens, draft_tokens_accepted;
    int64_t draft_accepted_at[16]; /* of these, by their place in the draft */
    double draft_s;  /* seconds in which drafts were looked up or drawn */
    double plan_s;   /* seconds spent planning steps. With run-ahead, plan_s and commit_s overlap
                        with run_s */
    double run_s;    /* seconds in which the first rank of a replica had a step, its waits for other
                        ranks included; the mean of all replicas */
    double commit_s; /* seconds spent committing results, callbacks included */
    int64_t masks;   /* masks of constraints: one for each row whose sample has a constraint */
    int64_t masks_made; /* of these, for places of a grammar where no row had been before; the
                           others were kept */
    int64_t forced_tokens; /* output tokens that took no step of their own, as their mask has one
                              id */
    int64_t masks_late; /* rows that ran in a later step, as their mask came too late */
    double mask_s;   /* seconds that workers spent on masks and on reading the tokens before them */
    /* 0 if the model has no such layers */
    int windowed_pages;      /* pages of layers with a window, which keep only their window */
    int windowed_pages_used; /* of these, held by running samples */
    int windowed_pages_peak; /* the most that were held at once */
    int states, states_used; /* states of linear mixers, one a sample; of running samples */
    int states_peak;         /* the most at once */
    int snapshots, snapshots_used; /* copies of states that are kept; that belong to a prefix */
    int64_t snapshot_hits;   /* how often a sample began with one */
    int weight_updates; /* successful toka_update_weights: the version of the weights */
    int paused;         /* 1: toka_pause, until toka_resume; also while memory is given back */
    int sleeping;       /* toka_sleep: the parts whose memory is given back, TOKA_PART_* */
} toka_stats;

/* Thread: any, also in callbacks. */
toka_stats toka_get_stats(toka *t);

/* ---- Weights that change ---------------------------------------------------------------------
 * For reinforcement learning: the weights of an open model are replaced while requests run.
 * Thread: any, but not in a callback. If no thread drives the engine, these functions drive it. */

/* Stops the engine: when it returns, no step is in flight and none will be planned. Samples that
 * run stay as they are, with their K and V. wait 1: requests that were submitted before end first.
 * Later requests are taken, and wait. toka_cancel works. Does nothing if the engine is paused.
 * A toka_resume, or a toka_pause with wait 0, ends one that waits: this returns TOKA_E_CANCELLED.
 * Returns TOKA_E_DEVICE if the device has failed. */
int toka_pause(toka *t, int wait, toka_err *e);

/* Goes on after toka_pause; else does nothing. Errors are those of toka_pause, and TOKA_E_USE while
 * the engine sleeps. */
int toka_resume(toka *t, toka_err *e);

/* No request that starts from now on reads what the prefix cache has. Errors as above. */
int toka_reset_prefix_cache(toka *t, toka_err *e);

/* Replaces all weights by those of another folder (or hub id), between two steps. Its config.json,
 * names, shapes, formats and tokenizer, if it has one, are checked before anything changes; only
 * tensors are taken from it. The files are mapped, not copied: they must not change until the next
 * update or toka_close. Where the open model has FP8 numbers, or int4 numbers packed by rows, plain
 * numbers are taken, too, and quantized in memory by its rule. Running samples go on with their K
 * and V; later ones do not read the prefix cache of the old weights. An engine that is paused stays
 * paused.
 * After an error the old weights stay. Returns TOKA_E_USE if the device cannot do it (cuda without
 * enable_sleep_mode; then and after toka_sleep weights are copied to the GPU),
 * TOKA_E_INPUT if the folder does not fit, TOKA_E_IO, TOKA_E_MEMORY, TOKA_E_DEVICE. */
int toka_update_weights(toka *t, const char *model, toka_err *e);

/* The same with a delta: a folder, or one file, of safetensors with some tensors of the model,
 * under their names in its files. The other tensors stay; if they were dropped (toka_sleep), it is
 * TOKA_E_INPUT. Each must have the shape and the format of the one that it replaces, or plain
 * numbers, as above; those of an int4 matrix are named MODULE.weight. sha256: a JSON object with
 * the SHA-256 of each tensor of the delta, hex digits by name, which are compared first; NULL: no
 * hashes. */
int toka_patch_weights(toka *t, const char *path, const char *sha256, toka_err *e);

/* Gives the memory of these parts of the device back, until toka_wake_up. Samples that run lose
 * their K and V with TOKA_PART_KV: they keep their tokens, and compute K and V again later. The
 * prefix cache is empty then. drop_weights 0: a copy of the weights stays outside of the device (on
 * the CPU: the mapped files). 1: there is none, the files are not mapped any more; toka_wake_up
 * reads them again if toka_update_weights has not brought others. The engine is paused while
 * something sleeps. Later requests are taken, and wait. Parts that sleep may be named again.
 * After an error everything is awake. Returns TOKA_E_USE if the device cannot do it (plain, cuda
 * without enable_sleep_mode), or if no update could replace the weights to drop: those of an
 * embedded model, and int4 packed by columns. TOKA_E_MEMORY, TOKA_E_DEVICE. */
enum { TOKA_PART_KV = 1, TOKA_PART_WEIGHTS = 2, TOKA_PART_ALL = 3 };
int toka_sleep(toka *t, int parts, int drop_weights, toka_err *e);

/* Allocates the memory of these parts again. If all parts are awake then, the engine goes on.
 * Returns TOKA_E_MEMORY if the memory is not there; TOKA_E_INPUT or TOKA_E_IO if weights that were
 * dropped cannot be read again (a delta) or have changed; TOKA_E_DEVICE. The engine sleeps on
 * then. */
int toka_wake_up(toka *t, int parts, toka_err *e);

/* Loads an adapter (LoRA) from a folder that PEFT has written: adapter_config.json and
 * adapter_model.safetensors. Requests that name it (toka_request.adapter) run with it; the engine
 * goes on meanwhile. The files are copied. replace 1: if the name is in use, the new adapter takes
 * it. Requests that have begun keep the adapter that they began with, here as in
 * toka_unload_adapter; its memory is freed after the last of them.
 * Returns TOKA_E_USE if toka_options.max_loras is 0, so many adapters are loaded, or the name is in
 * use; TOKA_E_INPUT if the adapter does not fit the model or has what toka does not compute (the
 * message names it); TOKA_E_IO. Nothing has changed then. Thread: any, also in callbacks. */
int toka_load_adapter(toka *t, const char *name, const char *folder, int replace, toka_err *e);

/* Takes an adapter's name away. Returns TOKA_E_USE if there is no such adapter. Thread: any. */
int toka_unload_adapter(toka *t, const char *name, toka_err *e);

/* Scores a text: logprobs[i] is the log-probability of ids[i] given ids[0 .. i-1]; logprobs[0] is
 * 0. ids: [n_ids], n_ids is 1 to max_model_len. logprobs: [n_ids], the caller's. It is a request
 * like others (n 0, prompt_logprobs), computed in chunks, so no array of [tokens][vocabulary]
 * exists. Errors and threads are those of toka_generate. After TOKA_E_DEVICE or TOKA_E_CANCELLED
 * the first entries of logprobs may have been written; after other errors it is unchanged. */
int toka_score(toka *t, const int32_t *ids, size_t n_ids, float *logprobs, toka_err *e);

/* Computes the embedding of a text as the model's folder defines it (toka_request_embedding).
 * ids: [n_ids], n_ids is 1 to max_model_len. dimensions: 1 to the model's width, or 0 for what the
 * folder defines. vector: [dimensions] the caller's; with dimensions 0 it must have toka_info.width
 * elements. *n_vector, which may be NULL, gets the number of its elements. After an error vector is
 * unchanged. Errors and threads are those of toka_generate and toka_request_embedding. */
int toka_embed(toka *t, const int32_t *ids, size_t n_ids, int dimensions, float *vector,
               int *n_vector, toka_err *e);

/* Only if toka.c is compiled with -DTOKA_SERVER (which -DTOKA_MAIN implies).
 * main() of the toka program. Returns the exit status: 0, 1, 2, or 130 after Ctrl-C. Installs
 * handlers for SIGINT, SIGTERM and SIGBUS, and ignores SIGPIPE and SIGXFSZ; so a program that calls
 * it should do nothing else. */
int toka_main(int argc, char **argv);

/* ============================================================================================ */
#ifdef TOKA_INTERNAL
#include <assert.h>

/* The backend boundary: one table of functions (toka_backend) with three instances: toka_plain and
 * toka_cpu in toka.c, toka_cuda in toka_kernels.cu. toka_plain is the definition of each op in
 * code.
 *
 * Dimension letters, equal everywhere: T tokens of this step, S sequences, L layers, H query heads,
 * K kv heads, D head size, E model width, F mlp width, V vocabulary, B tokens per page (a page is
 * vLLM's block). All matrices are row-major; a weight is [outputs][inputs].
 *
 * Errors: the first op that fails stores its error in the device, and later ops do nothing. The
 * thread of a rank (chapter 31) calls status() after each step.
 *
 * Ranks: a model may be spread over several devices, one rank each: pp stages x tp tensor ranks. A
 * stage has consecutive layers. Each tensor rank of a stage has some of the heads, of the MLP's
 * columns and of the vocabulary. L, H, K, F and V are those of the rank; E, D, B and the rest are
 * equal on all ranks. A model on one device is one rank that has everything.
 *
 * The calls of one step, with pp 2; all tensor ranks of a stage make the same calls:
 *
 *     stage 0  begin  copy_pages  embed  all_reduce  layers  send                end ... finish
 *     stage 1  begin  copy_pages  receive  keep_ids  layers  head                end ... finish
 *
 *     layers = L times: norm_qkv_rope_kv  attention  out_residual  all_reduce
 *                       norm_mlp_residual  all_reduce
 *     head   = norm_pool and norm_logits_sample, as far as the step has rows for them
 *
 * A step as integers, with B 4. Sequence 0 is in decode at position 9, its block table is 7 3 5,
 * and the host does not know its last token yet. Sequence 1 is in prefill; its prompt has 3 tokens:
 *
 *     row      0 |  1  2  3     T 4                  ids -1 is -1 - seq: the token that the device
 *     ids     -1 | 11 12 13                          keeps for sequence 0
 *     pos      9 |  0  1  2
 *     kv_slot 21 | 32 33 34     page * B + offset    row 0: page 5, offset 1
 *     pages   7 3 5 | 8
 *     spans   {row0 0, n_rows 1, page0 0, kv0 0, n_kv 10},
 *             {row0 1, n_rows 3, page0 3, kv0 0, n_kv 3}
 *     samples {row 0, seq 0}, {row 3, seq 1}         n_samples 2 */

typedef struct toka_dev_ptr { /* an address on a device, on the CPU a plain pointer. A struct, so
                                 that C code cannot dereference it */
    uint64_t at;
} toka_dev_ptr;

/* x, the residual stream, between two ops of a step: where it lies, and what the last op has left
 * there. Each step has one; each op that reads or writes x gets it, asserts that it can read this
 * state, and sets the state that it leaves. embed and receive overwrite x, whatever its state. */
typedef enum toka_hidden_state {
    TOKA_HIDDEN_EMPTY,     /* no op of this step has written x */
    TOKA_HIDDEN_WHOLE,     /* x is complete on every tensor rank */
    TOKA_HIDDEN_NORMED,    /* as WHOLE; in addition the device has prepared the input of the one op
                              that begins with the norm normed_for. Every other op reads x */
    TOKA_HIDDEN_PARTIAL,   /* the residual stream is the sum of x over the tensor ranks: only
                              all_reduce reads x */
    TOKA_HIDDEN_SCATTERED, /* each row of x lacks partial sums, which lie on the tensor rank that
                              owns the row. all_reduce does nothing; the next op with a norm, send
                              or end completes x */
    TOKA_HIDDEN_DELTA,     /* before the norm of what an op adds (attn_post_norm, mlp_post_norm): x
                              is this rank's part of what is added, and the device has kept the
                              residual stream. Only all_reduce reads x: it adds up the parts,
                              applies the norm, and adds the residual stream */
    TOKA_HIDDEN_SHARDED    /* after the norm of SCATTERED x: a tensor rank has only the rows that it
                              owns, the others are stale. The op continues from there and leaves
                              SCATTERED */
} toka_hidden_state;
typedef struct toka_hidden {
    toka_dev_ptr data; /* [T][E] */
    toka_hidden_state state;
    const void *normed_for; /* NORMED: the backend's copy of the norm's weights; else NULL */
} toka_hidden;

static inline bool toka_hidden_is_whole(const toka_hidden *x) {
    return x->state == TOKA_HIDDEN_WHOLE || x->state == TOKA_HIDDEN_NORMED;
}
/* Returns the address of x for an op that reads it: x must be whole. */
static inline toka_dev_ptr toka_hidden_read(const toka_hidden *x) {
    assert(toka_hidden_is_whole(x));
    return x->data;
}
/* Sets the state after an op that has written x: whole, or with tp_size > 1 this rank's part. */
static inline void toka_hidden_set_sum(toka_hidden *x, int tp_size) {
    x->state = tp_size > 1 ? TOKA_HIDDEN_PARTIAL : TOKA_HIDDEN_WHOLE;
    x->normed_for = NULL;
}

/* ---- FP8 numbers ----
 * The same code rounds on every backend, so all of them store the same bytes. */

#ifdef __CUDACC__
#define TOKA_HOST_DEVICE __host__ __device__
#else
#define TOKA_HOST_DEVICE
#endif

static inline TOKA_HOST_DEVICE uint32_t toka_float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline TOKA_HOST_DEVICE float toka_bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
/* Returns the nearest e4m3 number, ties to even; larger numbers become 448. NaN stays NaN. */
static inline TOKA_HOST_DEVICE unsigned char toka_to_fp8(float value) {
    const uint32_t all = toka_float_bits(value), size = all & 0x7FFFFFFF, sign = all >> 24 & 0x80;
    uint32_t bits;
    if (size > 0x7F800000) bits = 0x7F;
    else if (size >= 0x43E00000) bits = 0x7E; /* 448 or more */
    else if (size < 0x3C800000) /* below 2^-6: a multiple of 2^-9, the last bit of 2^14 + x */
        bits = toka_float_bits(toka_bits_float(size) + 16384) - toka_float_bits(16384);
    else bits = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - ((127 - 7) << 3);
    return (unsigned char)(sign | bits);
}
/* Returns the value of an e4m3 number; that of its NaN is 480. */
static inline TOKA_HOST_DEVICE float toka_from_fp8(unsigned char bits) {
    const uint32_t sign = (uint32_t)(bits & 0x80) << 24, size = (uint32_t)(bits & 0x7F) << 20;
    return toka_bits_float(sign | size) * 0x1p120f;
}

/* ---- Weights ---- */

typedef enum toka_dtype { /* the type of the elements of a tensor */
    TOKA_BF16, TOKA_F16, TOKA_F32,
    TOKA_FP8,   /* e4m3, a byte an element: sign, 4 bits of exponent (bias 7), 3 of mantissa */
    TOKA_INT4,  /* 4 bits, packed as toka_quant says */
    TOKA_MXFP4, /* e2m1, 4 bits: sign, 2 bits of exponent, 1 of mantissa; packed in pairs */
    TOKA_E8M0   /* a byte: 2^(byte - 127). Only scales have it */
} toka_dtype;

/* How the 4-bit elements of a matrix [rows][cols] are packed. rows: outputs, cols: inputs. A word
 * has 32 bits and 8 elements; element 0 is in its lowest 4 bits. */
typedef enum toka_packing {
    TOKA_PACK_ROWS, /* row by row. INT4: words [rows][cols/8]; zero points: words [rows/8][groups].
                       MXFP4: bytes [rows][cols/2], the lower 4 bits are the even column.
                       FP8: bytes [rows][cols] (compressed-tensors and others) */
    TOKA_PACK_GPTQ, /* words [cols/8][rows], of 8 columns each; zero points: [groups][rows/8] */
    TOKA_PACK_AWQ   /* words [cols][rows/8], of 8 rows each in the order 0 2 4 6 1 3 5 7; zero
                       points in the same order: [groups][rows/8] */
} toka_packing;

/* A quantized matrix as it lies in the mapped file:
 *
 *     element[row][col] = (number - zero point) * scale
 *
 * The elements of a block share a scale: block_rows x block_cols elements. The last blocks may be
 * cut by the matrix's edge. Chapter "Weight formats" of toka.c has the definition in code. */
typedef struct toka_quant {
    toka_packing packing;
    int rows, cols;             /* of the whole matrix */
    int block_rows, block_cols; /* rows, cols: one scale for the whole matrix */
    const void *scale;          /* scale of block (i, j): element i * scale_row_step +
                                   j * scale_col_step */
    toka_dtype scale_dtype;     /* TOKA_BF16, F16, F32, or with MXFP4 E8M0 */
    int scale_row_step, scale_col_step;
    const void *zero;  /* INT4: packed zero points; NULL: every zero point is 8 */
    int zero_add;      /* is added to each packed zero point: 1 in files of GPTQ version 1 */
    const void *group; /* INT4: int32 [cols], the group of each column (GPTQ's g_idx); NULL: column
                          col is in group col / block_cols */
    const int32_t *columns; /* only in a backend's own copy: column i of data belongs to element
                               columns[i] of x; NULL: to element i */
    float input_scale; /* static scale of the activations before an FP8 product; 0: none */
} toka_quant;

typedef struct toka_tensor { /* a weight, or a slice of one, in the mapped file; rows 0: absent */
    const void *data;        /* [rows][cols], borrowed from the mapping, not aligned. With quant:
                                the first byte of the whole matrix */
    toka_dtype dtype;
    int rows, cols;
    int stride;              /* elements from one row to the next; cols if rows are contiguous. Not
                                used with quant */
    const toka_quant *quant; /* NULL: plain elements. Else row i is row row0 + i * row_step of the
                                whole matrix, from column col0 on */
    int row0, row_step, col0;
    int matrix;                 /* number of the matrix of the files that it is a part of, as
                                   adapters count them (toka_adapters); 0: adapters leave it as it
                                   is */
    int matrix_row, matrix_col; /* where it begins in that matrix */
} toka_tensor;

/* Returns the bytes of one number of a type of scales. */
static inline size_t toka_number_bytes(toka_dtype dtype) {
    return dtype == TOKA_E8M0 ? 1 : dtype == TOKA_F32 ? 4 : 2;
}
/* Returns whether a device that knows only BF16, F16 and F32 can read the tensor. */
static inline bool toka_is_plain(const toka_tensor *t) { return t->dtype <= TOKA_F32; }
/* Writes row `row` of a tensor as float32: to [cols]. */
void toka_weight_row(const toka_tensor *tensor, int row, float *to);

/* ---- Layers: each is a mixer (attention, MLA or a linear mixer) and a feed-forward (an MLP or
 * experts) ---- */

typedef struct toka_rope { /* rotary position embedding: every kind of RoPE is this table ... */
    const float *freq;     /* [dims/2] radians per position */
    int dims;              /* the first dims elements of a head rotate, the others do not; even */
    float scale;           /* ... and a factor on cosine and sine (yarn, longrope), else 1 */
    bool neighbours;       /* pair i is the elements (2i, 2i+1); else (i, i + dims/2) */
} toka_rope;

typedef enum toka_activation { /* of gate and up, element by element */
    TOKA_SILU,                 /* silu(gate) * up */
    TOKA_GELU_TANH,            /* gelu(gate) * up, gelu by its tanh approximation */
    TOKA_SWIGLU_CLAMPED        /* g sigmoid(1.702 g) (u + 1), with g = min(gate, limit) and
                                  u = clamp(up, -limit, limit) (GPT-OSS) */
} toka_activation;

typedef struct toka_mlp {                     /* of a layer, or one expert */
    toka_tensor gate, up, down;                /* [F][E], [F][E], [E][F]; F: gate.rows */
    toka_tensor gate_bias, up_bias, down_bias; /* [1][F], [1][F], [1][E], or absent */
} toka_mlp;

typedef enum toka_router_kind {
    TOKA_ROUTER_SOFTMAX, /* softmax over all experts, then the top k */
    TOKA_ROUTER_TOPK,    /* the top k, then softmax over these */
    TOKA_ROUTER_SIGMOID  /* sigmoid of each expert, then the top k */
} toka_router_kind;

/* Experts. For each token the router gives each expert a score; the top_k experts with the highest
 * scores compute, and their outputs are added, each times its weight. Among equal scores the lower
 * expert (and group) is first. The sum is added up in rising order of the experts' numbers, the
 * shared expert last. */
typedef struct toka_moe {
    int n_experts, top_k;
    toka_router_kind kind;
    bool renormalize;            /* the weights of the top_k are divided by their sum */
    float scale;                 /* ... and multiplied by this; 0: 1 */
    int n_groups, top_groups;    /* n_groups > 1: experts are in n_groups equal groups, and only
                                    those of the top_groups best groups can be chosen */
    bool groups_by_top2;         /* a group's score is the sum of its two highest scores, with
                                    choice_bias; else its highest */
    toka_tensor router;          /* [X][E] */
    toka_tensor router_bias;     /* [1][X], added to the logits; or absent */
    toka_tensor choice_bias;     /* [1][X], added to the scores for the choice, not for the weights
                                    (DeepSeek-V3); or absent */
    const toka_mlp *experts;     /* [X] */
    toka_mlp shared;             /* every token uses it; absent: gate.rows is 0 */
    toka_tensor shared_gate;     /* [1][E]: its output is multiplied by sigmoid(shared_gate x); or
                                    absent */
} toka_moe;

/* Multi-head latent attention (DeepSeek). The cache has one latent vector and one rotated key a
 * token, for all heads: shape.K is 1, shape.D is latent + rope, shape.Dv is latent. A head has nope
 * elements that do not rotate and rope elements that do; a value has v elements:
 *
 *     q = q_b norm(q_a x), or q_b x       [H][nope + rope]
 *     c, r = kv_a x                       [latent], [rope]; cached: norm(c), RoPE(r)
 *     kv_b: for each head W_uk [nope][latent], then W_uv [v][latent]
 *     absorbed query  = W_uk^T q_nope, RoPE(q_rope)       [latent + rope]
 *     o of the layer  = W_o W_uv (what attention returns) */
typedef struct toka_mla {
    int latent, rope, nope, v;
    float eps;                   /* of the norms q_a_norm and kv_a_norm */
    toka_tensor q_a, q_a_norm;   /* [q_rank][E], [1][q_rank], or absent */
    toka_tensor q_b;             /* [H*(nope+rope)][q_rank], or [...][E] without q_a */
    toka_tensor kv_a, kv_a_norm; /* [latent+rope][E], [1][latent] */
    toka_tensor kv_b;            /* [H*(nope+v)][latent] */
} toka_mla;

/* A linear mixer: Gated DeltaNet (arXiv 2412.06464). It has no K and V. A sequence has a state of
 * fixed size in each such layer instead: a matrix S [key_size][value_size] for each value head, and
 * the last taps - 1 inputs of the convolution. Sizes: toka_shape.linear; here N is key_heads, M is
 * value_heads, and key head i serves the M / N value heads from i * M / N on. For each token:
 *
 *     q, k, v, z, b, a = W norm(x)     [N][key_size] twice, [M][value_size] twice, [M] twice
 *     q, k, v  silu of a convolution of each element over the last `taps` tokens
 *     q, k     each head to length 1: x / sqrt(sum of x^2 + 1e-6); q also / sqrt(key_size)
 *     S        = exp(-exp(a_log) softplus(a + dt_bias)) S, then S += k (sigmoid(b) (v - S^T k))^T
 *     o        = norm(S^T q) * silu(z)    [M][value_size]: the norm of each head, with weight
 *                `norm`, without shape.norm_offset
 *     output   = W_o o */
typedef struct toka_linear {
    /* The rows of W in one of two arrangements. By heads: for each key head those of q, k, v, z in
     * qkvz, those of b, a in ba. Else six matrices, and qkvz is absent. */
    toka_tensor qkvz, ba;
    toka_tensor q, k, v, z, b, a;
    toka_tensor conv_q, conv_k, conv_v; /* [N*key_size][taps] twice, [M*value_size][taps]; the last
                                           tap is that of the token itself */
    toka_tensor a_log, dt_bias;         /* [1][M] */
    toka_tensor norm;                   /* [1][value_size] */
    toka_tensor o;                      /* [E][M*value_size] */
} toka_linear;

/* A head of EAGLE-3 (arXiv 2503.01840): one layer that guesses the token after next of another
 * model, the target. It reads the token at position p and what the target's layers read at position
 * p - 1. Its row p begins as
 *     x = fc [a0, a1, a2]      a: the target's x before three of its layers (toka_device_options)
 * and where the target has not computed position p - 1, as the head's own x of that row, at the end
 * of its layer. q, k and v are [..][2E]: they read attn_norm(embedding of the token) and behind it
 * hidden_norm(x). Position 0 has no row, and no row sees it. */
typedef struct toka_head {
    toka_tensor fc;                     /* [E][3 * E of the target] */
    toka_tensor hidden_norm;            /* [1][E] */
    toka_tensor lm_head;                /* [n][E]: the head knows n of the V ids */
    const int32_t *ids;                 /* [n] rising: which ids these are; NULL: all */
    bool norm_first;                    /* x becomes hidden_norm(x) before the layer */
    int layers[3];                      /* of the target, rising */
} toka_head;

/* x += mixer(norm(x)), then x += feed_forward(norm(x)). Features that a layer does not have are
 * absent, NULL or 0. */
typedef struct toka_layer {
    const toka_head *head;              /* NULL: no head. Else it is the only layer */
    toka_tensor attn_norm;              /* [1][E]; absent: x itself */
    const toka_linear *linear;          /* NULL: attention or MLA. Else all fields from here to o
                                           are absent */
    toka_tensor q, k, v;                /* [H*D][E], [K*D][E], [K*Dv][E]; absent with mla */
    bool q_gate;                        /* q is [H*2*D][E]: after the D rows of each head D rows of
                                           a gate; attention's output of the head is multiplied by
                                           the sigmoid of the gate. Dv is D */
    toka_tensor q_bias, k_bias, v_bias; /* [1][rows of q], [1][K*D], [1][K*Dv], or absent */
    toka_tensor q_norm, k_norm;         /* [1][D]: a norm of each head; [H][D] and [K][D]: the same,
                                           with weights for each head; [1][H*D] and [1][K*D]: one
                                           norm of all heads together; or absent */
    int q_norm_all, k_norm_all;         /* the norm is of the heads of all tensor ranks together:
                                           how many elements they have; 0: of this rank's heads */
    const toka_mla *mla;                /* NULL: plain attention */
    const toka_rope *rope;              /* NULL: no position embedding */
    int window;                         /* sliding window: a token sees itself and the window-1
                                           tokens before it; 0: all */
    bool kv_fp8;                        /* K and V are stored as FP8 (toka_kv_scale) */
    toka_tensor sinks;                  /* [1][H]: one more score of each head's softmax, which has
                                           no value; or absent */
    toka_tensor o, o_bias;              /* [E][H*Dv], with mla [E][H*v]; [1][E] or absent */
    toka_tensor attn_post_norm;         /* [1][E]: a norm of the mixer's output; or absent */
    bool parallel;                      /* the feed-forward reads the same norm(x) as the mixer:
                                           mlp_norm is attn_norm, and its op runs first */
    toka_tensor mlp_norm;               /* [1][E]; absent: x itself */
    toka_mlp mlp;                       /* without moe */
    const toka_moe *moe;                /* NULL: mlp */
    toka_activation activation;
    toka_tensor mlp_post_norm;          /* [1][E]: a norm of the feed-forward's output; or absent */
} toka_layer;

/* What an adapter (LoRA, arXiv 2106.09685) adds to a matrix W of the files: y = W x becomes
 * y = W x + scale * b (a x). A tensor that is a slice of W takes its rows of b and its columns of
 * a. */
typedef struct toka_low_rank {
    toka_tensor a, b; /* [r][inputs of W], [outputs of W][r]; BF16, F16 or F32. a.rows 0: nothing */
    float scale;
} toka_low_rank;

enum { TOKA_MAX_ADAPTERS = 128, TOKA_MAX_LORA_RANK = 512 };

/* The adapters of a model. All its devices read it. An entry changes only while no request runs
 * with it. */
typedef struct toka_adapters {
    int max_rank;
    /* [1 .. TOKA_MAX_ADAPTERS] its low-rank parts, by toka_tensor.matrix; NULL: there is none */
    const toka_low_rank *of[TOKA_MAX_ADAPTERS + 1];
} toka_adapters;

typedef struct toka_weights {
    toka_tensor embed;   /* [V][E], in the first stage */
    toka_tensor norm;    /* [1][E], in the last stage */
    toka_tensor lm_head; /* [V][E], in the last stage; the embedding again if tied */
    toka_layer *layers;  /* [L] */
    const toka_adapters *adapters; /* NULL: the model has none and will have none */
} toka_weights;

enum { TOKA_ID_BLOCK = 256 }; /* ids of an id block, to which the random words of a draw belong
                                 (chapter 22 of toka.c defines the draw). Tensor ranks divide the
                                 vocabulary into such blocks */

typedef struct toka_linear_shape { /* of the layers with a linear mixer, in one rank */
    int n_layers;                /* 0: there are none */
    int key_heads, value_heads;  /* value_heads is a multiple of key_heads */
    int key_size, value_size;    /* elements of a head */
    int taps;                    /* of the convolution, 2 or more */
} toka_linear_shape;

typedef struct toka_shape { /* of one rank. A field that says 0 is off at 0 */
    int L, H, K, D, E, F, V; /* F: the widest MLP */
    int64_t expert_cols;    /* numbers of a token between its experts' matrices and the sum of
                               their outputs; 0: there are no experts */
    int64_t layer_work;     /* multiply-adds of one token in the matrices of a layer, the mean of
                               the whole model's layers; 0: those of attention and an MLP */
    int v0, V_all;          /* the rank has the ids v0 .. v0+V-1 of the V_all ids. v0 is a multiple
                               of TOKA_ID_BLOCK if V_all >= tp_size * TOKA_ID_BLOCK; else any
                               number */
    int B;                  /* tokens per page */
    int Dv;                 /* size of a value's head; 0: D */
    float eps;              /* of every norm */
    bool layer_norm;        /* norms subtract the mean first (LayerNorm, no bias); else RMSNorm */
    float norm_offset;      /* is added to the weights of every norm (Gemma: 1) */
    float attn_scale;       /* factor on the scores of attention; 0: 1/sqrt(D) */
    float qkv_limit;        /* q and k after their norms, and v, are clipped to -limit .. limit;
                               0: none */
    float attn_cap;         /* a score s becomes cap * tanh(s / cap); 0: none */
    float embed_scale;      /* factor on the embedding; 0: 1 */
    float residual_scale;   /* factor on what a layer's mixer and feed-forward add to x; 0: 1 */
    float swiglu_limit;     /* of TOKA_SWIGLU_CLAMPED */
    float logit_scale;      /* factor on the logits; 0: 1 */
    float logit_cap;        /* a logit l becomes cap * tanh(l / cap), after logit_scale; 0: none */
    int max_len;            /* most tokens of a sequence */
    toka_linear_shape linear;
} toka_shape;

static inline int toka_value_size(const toka_shape *shape) {
    return shape->Dv ? shape->Dv : shape->D;
}
/* Returns layer_work, also where it is 0. */
static inline int64_t toka_layer_work(const toka_shape *shape) {
    const int64_t heads = 2 * ((int64_t)shape->H + shape->K) * shape->D;
    return shape->layer_work ? shape->layer_work : shape->E * (heads + 3 * (int64_t)shape->F);
}
/* Returns the elements of K and V that one token has in one layer, and in all of the rank. */
static inline int64_t toka_layer_kv_elements(const toka_shape *shape) {
    return (int64_t)shape->K * (shape->D + toka_value_size(shape));
}
static inline int64_t toka_kv_elements(const toka_shape *shape) {
    return (shape->L - shape->linear.n_layers) * toka_layer_kv_elements(shape);
}

/* Returns the elements that a linear mixer's convolution goes over: q, k and v of all heads. */
static inline int toka_linear_channels(const toka_linear_shape *linear) {
    return 2 * linear->key_heads * linear->key_size + linear->value_heads * linear->value_size;
}
/* Returns the numbers that a linear mixer makes of a token: q, k, v, z, b and a. */
static inline int toka_linear_width(const toka_linear_shape *linear) {
    return toka_linear_channels(linear) + linear->value_heads * (linear->value_size + 2);
}
/* Where a linear mixer's numbers of one token lie, which the op norm_qkv_rope_kv leaves: key head i
 * has its q at q + i * key_step, k at k + i * key_step. Its value heads are neighbours: they have
 * their v from v + i * value_step on, z from z + i * value_step on, b and a from b + i * gate_step
 * and a + i * gate_step on. */
typedef struct toka_linear_at {
    int q, k, v, z, b, a;
    int key_step, value_step, gate_step;
} toka_linear_at;
static inline toka_linear_at toka_linear_places(const toka_linear_shape *shape,
                                                const toka_linear *linear) {
    const int n_keys = shape->key_heads, per_key = shape->value_heads / n_keys;
    const int key = shape->key_size, values = per_key * shape->value_size;
    toka_linear_at at = {0, key, 2 * key, 2 * key + values, 0, 0, 0, 0, 2 * per_key};
    at.key_step = at.value_step = 2 * (key + values);
    at.b = n_keys * at.key_step;
    at.a = at.b + per_key;
    if (linear->qkvz.rows) return at;
    at.k = n_keys * key;
    at.v = 2 * at.k;
    at.z = at.v + n_keys * values;
    at.a = at.b + n_keys * per_key;
    at.key_step = key;
    at.value_step = values;
    at.gate_step = per_key;
    return at;
}
/* Lists the matrices W of a linear mixer in the order of their rows. Returns their number. */
static inline int toka_linear_matrices(const toka_linear *linear, const toka_tensor *matrices[6]) {
    const toka_tensor *const all[] = {&linear->qkvz, &linear->ba, &linear->q, &linear->k,
                                      &linear->v,    &linear->z,  &linear->b, &linear->a};
    int n = 0;
    for (int i = 0; i < 8; i++)
        if (all[i]->rows) matrices[n++] = all[i];
    return n;
}

/* Returns the elements of a sequence's state in one layer: S of all heads, then [taps - 1] inputs
 * of each element of the convolution. chunk: toka_backend.state_chunk; each of so many tokens has a
 * key, a change of S and a decay in each head. */
static inline int64_t toka_state_elements(const toka_linear_shape *linear, int chunk) {
    const int64_t J = linear->key_size, U = linear->value_size;
    return linear->value_heads * (J * U + chunk * (J + U + 1)) +
           (int64_t)toka_linear_channels(linear) * (linear->taps - 1);
}

/* Returns the elements of one token in q and in o, the arguments of the ops, for this layer. With a
 * linear mixer q has toka_linear_width numbers in the order of its matrices. */
static inline int toka_q_width(const toka_shape *shape, const toka_layer *layer) {
    return layer->linear ? toka_linear_width(&shape->linear)
                         : shape->H * shape->D * (layer->q_gate ? 2 : 1);
}
static inline int toka_o_width(const toka_shape *shape, const toka_layer *layer) {
    return layer->linear ? shape->linear.value_heads * shape->linear.value_size
                         : shape->H * toka_value_size(shape);
}

/* ---- K and V as FP8 ----
 * Each head of K and of V of a token has a scale of its own, a power of two: the smallest one with
 * which all numbers of the head are at most 448. So the stored bytes of a token depend on it
 * alone, and pages can be shared and copied as they are. A power of two costs no accuracy, because
 * e4m3 numbers have an exponent, and the products are exact in bf16.
 *
 *     element = e4m3 number * scale
 *     page of a layer: the e4m3 numbers of all heads, as bf16 or float32 elements would lie there,
 *                      then the scales, a byte each (E8M0): [kv head][B][K, V] */

/* Returns the elements of K and V of one token in one layer. v_in_k: with MLA V is a part of K
 * (toka_backend.v_in_k). */
static inline int64_t toka_kv_row_elements(const toka_shape *shape, bool v_in_k) {
    const int Dv = toka_value_size(shape);
    return (int64_t)shape->K * (shape->D + (v_in_k && Dv != shape->D ? 0 : Dv));
}
/* Returns the bytes of K and V of one token in one layer. element_bytes: of an element that is not
 * FP8. */
static inline int64_t toka_kv_row_bytes(const toka_shape *shape, bool fp8, size_t element_bytes,
                                        bool v_in_k) {
    const int64_t n = toka_kv_row_elements(shape, v_in_k);
    return fp8 ? n + 2 * (int64_t)shape->K : n * (int64_t)element_bytes;
}
/* Returns the place of a token's scale of K among the scales of its page; that of V follows. */
static inline TOKA_HOST_DEVICE size_t toka_kv_scale_at(int B, int kv_head, int offset) {
    return ((size_t)kv_head * (size_t)B + (size_t)offset) * 2;
}
/* Returns the scale of a head. largest: the bits of its largest magnitude. A NaN counts as larger
 * than all numbers, and makes the whole head NaN. The scale is at least 2^-100 and at most 2^7:
 * larger numbers than 448 * 128 become that. */
static inline TOKA_HOST_DEVICE unsigned char toka_kv_scale(uint32_t largest) {
    /* 448 is 1.75 * 2^8: 8 binades above 1, and one more if the mantissa is above that of 1.75 */
    const int scale = (int)(largest >> 23) - 8 + ((largest & 0x7FFFFF) > 0x600000);
    if (largest > 0x7F800000) return 255;
    return (unsigned char)(scale < 127 - 100 ? 127 - 100 : scale > 127 + 7 ? 127 + 7 : scale);
}
static inline TOKA_HOST_DEVICE float toka_kv_scale_value(unsigned char scale) {
    return toka_bits_float(scale == 255 ? 0x7FC00000 : (uint32_t)scale << 23);
}
/* Returns the e4m3 number of an element of a head with this scale. */
static inline TOKA_HOST_DEVICE unsigned char toka_kv_round(float element, unsigned char scale) {
    return toka_to_fp8(element * toka_bits_float((uint32_t)(254 - scale) << 23));
}
/* Stores one head of K or V, n elements, in `to`; its neighbours there are `step` bytes apart.
 * Returns its scale. */
static inline unsigned char toka_kv_store(unsigned char *to, size_t step, const float *from,
                                          int n) {
    uint32_t largest = 0;
    for (int i = 0; i < n; i++) {
        const uint32_t size = toka_float_bits(from[i]) & 0x7FFFFFFF;
        largest = size > largest ? size : largest;
    }
    const unsigned char scale = toka_kv_scale(largest);
    for (int i = 0; i < n; i++) to[(size_t)i * step] = toka_kv_round(from[i], scale);
    return scale;
}

/* An attention segment: the rows row0 .. row0+n_rows-1 of this step attend to the kv positions
 * kv0 .. kv0+n_kv-1, which are in pages[page0] (the page of kv0), pages[page0+1] ... A row at
 * position p sees only kv positions <= p. If several sequences share a prefix, one shared span
 * covers the prefix for all of them (their rows are neighbours), and one span for each covers the
 * rest. The spans of a row cover the positions 0 .. p exactly once, in rising order of kv0. kv0 is
 * a multiple of B, unless the backend has span_align_tok (see there). */
typedef struct toka_span {
    int row0, n_rows, page0, kv0, n_kv;
} toka_span;

/* What the rows row0 .. row0+n_rows-1 of a step, neighbours in one sequence, do to its state in
 * each linear layer. State `to` becomes a copy of state `from`, unless they are the same; from -1:
 * zeros, as before the first token. Then the rows change `to`, one after the other. n_rows may be
 * 0. */
typedef struct toka_state_span {
    int row0, n_rows, from, to; /* states 0 .. n_states-1 of the device */
} toka_state_span;

/* Bad words as texts, compiled for one vocabulary (chapter 22 of toka.c has an example): an
 * automaton that reads the ids of an output. A place is a word and the number of its first bytes in
 * which the output's text ends. An output may be at several places at once, or at none. */
enum {
    TOKA_WORD_ANY = -1, /* from: at every place and at none */
    TOKA_WORD_SKIP = -2 /* from: the id has no text, so it changes no place. With `to` 1 this holds
                           only where special tokens are left out */
};
enum { TOKA_MAX_WORD_RULES = 1 << 19 }; /* steps and ends of one table */
typedef struct toka_word_rule {
    int32_t id;
    int from, to; /* places 0 .. n_places-1 */
} toka_word_rule;
typedef struct toka_word_table {
    const toka_word_rule *steps; /* [n_steps] in the order of ids: if the output is at `from` and
                                    this id is appended, it is at `to`. It is at no other place */
    const toka_word_rule *ends;  /* [n_ends] if the output is at `from`, the id would complete a
                                    word, so it is forbidden; `to` is not used. Those from
                                    TOKA_WORD_ANY are the first n_whole */
    int n_steps, n_ends, n_whole, n_places;
    int n_ids;   /* ids of the tokenizer; higher ids have no text */
    int max_ids; /* most ids with text from the beginning of a word to a place */
} toka_word_table;

/* A sample row: a row whose logits are sampled or scored, and how. Its pointers are host memory
 * that is valid until the step is done. */
typedef struct toka_sample_row {
    int row;                       /* 0 .. T-1 */
    int seq;                       /* the scheduler's index of the sequence: the device keeps the
                                      sampled id as the last token of seq, so that a later step can
                                      use it before the host knows it; -1: not kept */
    int32_t scored_id;             /* >= 0: score this id, draw nothing */
    bool wants_rank;               /* with scored_id and sampling: compute the rank of the id */
    uint32_t sample;               /* sample index and ... */
    uint32_t position;             /* ... position of the token to draw: with the seed they
                                      determine the random number */
    const toka_sampling *sampling; /* may be NULL with scored_id */
    const int32_t *pages;          /* with penalties, bad_ids or words: the pages of the sequence's
                                      first n_history tokens, of which the device keeps the ids (see
                                      keep_ids) */
    int n_prompt, n_history;       /* n_history: tokens before the one to draw; the first n_prompt
                                      of them are the prompt, the rest is output */
    const int32_t *forbidden;      /* [n_forbidden] ids that may not be drawn now (end ids before
                                      min_tokens) */
    int n_forbidden;
    const toka_word_table *words;  /* bad words as texts; NULL: none */
    bool keep_special;             /* with words: special tokens are part of the output's text */
    const uint32_t *mask;          /* NULL, or a bit for each of the V_all ids, bit id % 32 of word
                                      id / 32: only ids with a 1 may be drawn now (constraint). Rows
                                      with equal masks may share one */
    bool awaits_mask;              /* the mask is NULL before norm_logits_sample. It may be NULL
                                      there, too: then the row draws any id, and its result is not
                                      used */
} toka_sample_row;

/* Returns true if the row has a mask, or will have one. */
static inline bool toka_has_mask(const toka_sample_row *row) {
    return row->mask || row->awaits_mask;
}

/* Returns true if the result of this row must have a logprob; else its logprob is NAN. A scored id
 * always has one. */
static inline bool toka_wants_logprob(const toka_sample_row *row) {
    return row->scored_id >= 0 || row->sampling->logprobs >= 0;
}

/* Returns the id to sample if all logits are -inf: the lowest id that is allowed, in the mask and
 * not forbidden; if there is none, an id that is not in the mask, or the lowest allowed id. It may
 * complete a bad word. All backends call it, so that they agree. The lists may be as long as the
 * vocabulary, so it looks at WINDOW ids at a time. */
static inline int32_t toka_fallback_id(const toka_sample_row *row, int V) {
    enum { WINDOW = 1024 };
    const toka_sampling *sampling = row->sampling;
    bool allowed[WINDOW], forbidden[WINDOW];
    int32_t lowest = sampling->n_allowed ? V : 0;
    if (row->mask && !sampling->n_allowed) /* skips the words of the mask that are 0 */
        while (lowest < V && !row->mask[lowest / 32]) lowest += 32;
    if (lowest >= V && !sampling->n_allowed) return 0;
    for (int i = 0; i < sampling->n_allowed; i++)
        lowest = sampling->allowed_ids[i] < lowest ? sampling->allowed_ids[i] : lowest;
    for (int from = lowest; from < V; from += WINDOW) {
        for (int i = 0; i < WINDOW; i++) {
            allowed[i] = !sampling->n_allowed;
            forbidden[i] = false;
        }
        for (int i = 0; i < sampling->n_allowed; i++)
            if (sampling->allowed_ids[i] >= from && sampling->allowed_ids[i] - from < WINDOW)
                allowed[sampling->allowed_ids[i] - from] = true;
        for (int i = 0; i < row->n_forbidden; i++) /* end ids may be >= V: such ids are ignored */
            if (row->forbidden[i] >= from && row->forbidden[i] - from < WINDOW)
                forbidden[row->forbidden[i] - from] = true;
        for (int i = 0; i < WINDOW && from + i < V; i++)
            if (allowed[i] && !forbidden[i] &&
                (!row->mask || row->mask[(from + i) / 32] >> (from + i) % 32 & 1))
                return from + i;
    }
    return lowest;
}

enum { TOKA_MAX_BAD_IDS = 1 << 18 }; /* ids of all bad_ids of one request */

typedef struct toka_sample_result { /* the result of a sample row */
    int32_t id;                     /* the sampled id, or scored_id */
    float logprob, sampled_logprob; /* as in toka_event */
    int rank;                       /* with wants_rank: the place of the id in the order of raw
                                       logits, 1 for the highest; the lower id comes first among
                                       equal logits. Else 0 */
    int n_top;                      /* number of entries of the two arrays that are set */
    int32_t top_ids[TOKA_MAX_LOGPROBS];
    float top_logprobs[TOKA_MAX_LOGPROBS];
} toka_sample_result;

/* Rows of the step whose hidden states are pooled: they are added, one after the other, to the sum,
 * which is host memory that is valid until the step is done. So a sum over the rows of several
 * steps does not depend on how they are divided into steps. */
typedef struct toka_pool_rows {
    int row0, n_rows; /* rows row0 .. row0+n_rows-1 */
    double *sum;      /* [E] */
} toka_pool_rows;

typedef struct toka_copy { /* copies a whole KV page, in all layers of its pool */
    int32_t from, to;      /* pages */
} toka_copy;

typedef struct toka_step { /* one forward step as integers; host memory, unchanged until the step is
                              done, but for the masks of rows with awaits_mask */
    int T, n_spans, n_samples;
    const int32_t *ids;      /* [T] token ids. -1 - seq: the last token of sequence seq, which an
                                earlier step sampled and the device keeps */
    const int32_t *pos;      /* [T] position of each token in its sequence */
    const int32_t *kv_slot;  /* [T] page * B + offset: where the token's K and V are stored */
    const int32_t *pages;    /* block tables; toka_span.page0 is an index into it */
    const toka_span *spans;  /* [n_spans] */
    int n_copies;
    const toka_copy *copies; /* [n_copies] done before any K or V of this step is stored. No page is
                                both a `from` and a `to`, and none is twice a `to` */
    const toka_sample_row *samples; /* [n_samples] */
    int n_pools;
    const toka_pool_rows *pools; /* [n_pools], of different sums */
    float *logits;      /* NULL, or [n_samples][V_all] in host memory: raw logits, for tests */
    int64_t number;     /* with stages: 1, 2, 3 ... in the order in which the ranks run the steps */
    int64_t needs_step; /* with stages: number of the latest step that sampled a token which this
                           step uses by -1 - seq (that step has n_samples > 0); 0: none */
    /* With windowed pages (toka_device_options.n_windowed), else NULL: kv_slot, pages and copies
     * once more, for the layers with a window. A page that no row of the step sees there may be
     * -1. */
    const int32_t *windowed_slot, *windowed_pages;
    const toka_copy *windowed_copies;
    /* With linear layers: every row is in one span; the spans are done in this order. */
    int n_states;
    const toka_state_span *states; /* [n_states] */
    const uint8_t *adapters; /* NULL, or [T] number of each row's adapter (toka_adapters.of); 0:
                                none */
    const int32_t *aux_from; /* of a head, [T]: the kv_slot of the token before the row's, of which
                                the target has kept x; or -1 - i: sample i of the head's last step
                                was that token's row */
} toka_step;

/* Return what of the step is for this layer: kv_slot, pages, copies. */
static inline const int32_t *toka_layer_slots(const toka_step *step, const toka_layer *layer) {
    return layer->window && step->windowed_slot ? step->windowed_slot : step->kv_slot;
}
static inline const int32_t *toka_layer_table(const toka_step *step, const toka_layer *layer) {
    return layer->window && step->windowed_pages ? step->windowed_pages : step->pages;
}
static inline const toka_copy *toka_layer_copies(const toka_step *step, const toka_layer *layer) {
    return layer->window && step->windowed_copies ? step->windowed_copies : step->copies;
}

typedef struct toka_device toka_device; /* a backend's own state of one device */
typedef struct toka_group toka_group;   /* what the ranks of a model share (rank runtime) */

typedef struct toka_device_options {
    int n_threads;     /* CPU: threads of all n_devices together; 0: one per core */
    int max_tokens;    /* largest T of a step */
    int max_samples;   /* largest n_samples of a step */
    int n_pages;       /* size of the KV pool, pages */
    int n_windowed;    /* size of a pool of windowed pages, for K and V of the layers with a window,
                          only with has_windowed; 0: all layers have n_pages pages */
    int n_states;      /* states of a sequence that the device has, with linear layers */
    int n_devices;     /* devices that this process opens, this one included; 0: 1. CPU devices
                          divide the machine's memory */
    int index;         /* index of this device among the n_devices */
    int n_seqs;        /* sequences whose last tokens the device keeps; 0: none, all ids are >= 0 */
    toka_group *group; /* borrowed; NULL: this process opens no other device */
    int tp_rank, tp_size, pp_rank, pp_size; /* place in the group; a size of 0 means 1 */
    double memory_utilization; /* CUDA: share of the free memory that may be allocated; 0: 0.9 */
    bool eager;                /* CUDA: no CUDA graphs, all steps are launched kernel by kernel */
    bool bf16;                 /* CPU: the inputs of matrix products are rounded to bf16 */
    bool can_sleep;            /* CUDA: `sleep` can be called */
    int n_routed;              /* experts of each token and layer that read_experts gives; 0: none
                                  are kept */
    const int *aux_layers;     /* NULL, or [3]: keep_aux keeps x before these layers of every token
                                  in the KV pool, for a head */
    toka_device *target;       /* of a head: the open device whose x and embedding it reads */
    /* NULL, or reports progress. what: the phase; done: the part of it that is done, 0 to 1. Called
     * on any thread, one call at a time. */
    void (*progress)(void *user, const char *what, double done);
    void *user; /* the first argument of progress */
} toka_device_options;

/* The ops whose time a device measures: it times some steps op by op. FLOP and bytes are computed
 * from the step's integers, not measured; bytes: the least that must be moved. */
enum {
    TOKA_OP_EMBED, TOKA_OP_QKV, TOKA_OP_ATTENTION, TOKA_OP_OUT, TOKA_OP_MLP, TOKA_OP_HEAD,
    TOKA_OP_ALL_REDUCE,   /* with the waits for other tensor ranks; bytes: sent over the rank's
                             links, without those that a GEMM kernel sends while it computes */
    TOKA_OP_SEND_RECEIVE, /* sends and receives x between stages; bytes: those of x */
    TOKA_N_OPS
};
typedef struct toka_op_times { /* sums over the timed steps */
    double seconds, flop, bytes;
} toka_op_times;
typedef struct toka_times { /* by the device's clock. The warm-up step is not counted */
    int64_t steps, graphs;  /* all steps; those run as CUDA graphs */
    double busy_s;          /* seconds in steps */
    double idle_s;          /* seconds between two steps, the wait for the next upload included;
                               with stages this is the pipeline bubble */
    double begin_s, end_s;  /* begin and end of the last finished step, in seconds since the begin
                               of the first counted step */
    int64_t n_timed;        /* steps timed op by op */
    toka_op_times op[TOKA_N_OPS];
} toka_times;

typedef struct toka_memory { /* of one device, bytes */
    int64_t weights, kv; /* the model's weights; the KV pool */
    int64_t other;       /* everything else that is in use since the device was opened */
} toka_memory;

typedef struct toka_bench_row { /* one measurement of `toka bench ops` */
    const char *op, *model, *shape; /* valid during the call */
    double us, flop, bytes;         /* of one call of the op; bytes: the least that must be moved */
} toka_bench_row;
typedef void toka_bench_fn(void *user, const toka_bench_row *row);

/* Returns the pages of one layer. */
static inline int toka_layer_pages(const toka_device_options *options, const toka_layer *layer) {
    if (layer->linear) return 0;
    return layer->window && options->n_windowed ? options->n_windowed : options->n_pages;
}

/* ---- Experts that a device keeps: [slots][L][n_routed], zeros at first ---- */

static inline size_t toka_experts_bytes(const toka_device_options *options,
                                        const toka_shape *shape) { /* of a slot */
    return (size_t)(shape->L * options->n_routed) * sizeof(int16_t);
}
/* Returns where the experts of a slot and layer are; NULL: none are kept. */
static inline int16_t *toka_experts_at(const toka_device_options *options, const toka_shape *shape,
                                       int16_t *experts, int slot, int layer) {
    const size_t at = (size_t)slot * (size_t)shape->L + (size_t)layer;
    return options->n_routed ? experts + at * (size_t)options->n_routed : NULL;
}
static inline void toka_experts_copy_page(const toka_device_options *options,
                                          const toka_shape *shape, int16_t *experts,
                                          toka_copy copy) {
    if (options->n_routed)
        memcpy(toka_experts_at(options, shape, experts, copy.to * shape->B, 0),
               toka_experts_at(options, shape, experts, copy.from * shape->B, 0),
               (size_t)shape->B * toka_experts_bytes(options, shape));
}
/* As toka_backend.read_experts. */
static inline void toka_experts_read(const toka_device_options *options, const toka_shape *shape,
                                     int16_t *experts, const int32_t *slots, int n, int16_t *to,
                                     size_t stride) {
    for (int i = 0; i < n; i++)
        memcpy(to + (size_t)i * stride, toka_experts_at(options, shape, experts, slots[i], 0),
               toka_experts_bytes(options, shape));
}

typedef struct toka_backend {
    const char *name;
    /* Describes device number i of this kind in one line. Returns 0 if it cannot be used; then line
     * has the reason. */
    int (*probe)(int i, char *line, size_t bytes);
    /* Returns the number of devices of this kind that one process can use; NULL: no limit. */
    int (*count)(void);
    /* Returns 0 if the backend has every format and every kind of layer of this model. Else returns
     * TOKA_E_INPUT with a sentence that names what it does not have. NULL: it has all. */
    int (*supports)(const toka_shape *shape, const toka_weights *weights, toka_err *e);
    /* Returns the bytes that are left for the KV pool beside everything else, for this model and
     * this step size, on the device that `o` names. Ignores o->n_pages and o->group. */
    int64_t (*kv_bytes)(const toka_shape *shape, const toka_weights *weights,
                        const toka_device_options *o);
    /* Opens a device and allocates all its memory. `shape` and `weights` are borrowed until close.
     * Returns 0 or an error; after an error nothing is kept and *out is unchanged. */
    int (*open)(toka_device **out, const toka_device_options *o, const toka_shape *shape,
                const toka_weights *weights, toka_err *e);
    void (*close)(toka_device *d);
    /* Takes other weights of the same sizes and formats, which are borrowed until close. Without
     * commit it only checks that it can; with commit it succeeds. Thread: the driver, while no step
     * is posted. NULL: the device cannot. */
    int (*rebind)(toka_device *d, const toka_weights *weights, bool commit, toka_err *e);
    /* Loads adapter `number` to the device; parts NULL: drops it, if the device has it. Thread:
     * any, also while steps run, but not while a step has rows of this adapter. After an error the
     * device does not have it. NULL: ops read toka_adapters. */
    int (*set_adapter)(toka_device *d, int number, const toka_low_rank *parts, toka_err *e);
    /* Gives the memory of these parts (TOKA_PART_*) back. drop_weights false: the device keeps a
     * copy of the weights elsewhere. What sleeps may be named again, to drop the copy. Thread: the
     * driver, while no step is posted. After an error `wake` restores everything. NULL: the device
     * cannot. */
    int (*sleep)(toka_device *d, int parts, bool drop_weights, toka_err *e);
    /* Allocates the memory again, at its old addresses, with the weights if there is a copy; else
     * rebind brings them. What is awake may be named. After an error it may be called again. */
    int (*wake)(toka_device *d, int parts, toka_err *e);
    const char *(*describe)(const toka_device *d); /* one line; owned by the device */
    /* Thread: any, while no step is in flight. NULL: memory is not known. */
    void (*memory)(const toka_device *d, toka_memory *m);
    /* Returns 0, or the first error since open. */
    int (*status)(toka_device *d, toka_err *e);
    toka_dev_ptr (*alloc)(toka_device *d, size_t bytes); /* only right after open; close frees it */
    /* NULL, both: addresses of the device are plain pointers. */
    void (*upload)(toka_device *d, toka_dev_ptr to, const void *from, size_t bytes);
    void (*download)(toka_device *d, void *to, toka_dev_ptr from, size_t bytes);

    /* Copies the experts of the tokens in these n slots: those of slot i to
     * experts + i * stride, [L][n_routed]. The steps of these tokens are done; other steps may run.
     * Thread: the driver. NULL: the device keeps none. */
    void (*read_experts)(const toka_device *d, const int32_t *slots, int n, int16_t *experts,
                         size_t stride);

    /* ---- Weights over NCCL (chapter 42b) ----
     * nccl_memory allocates host memory that NCCL can write on this device. nccl_stream returns the
     * stream of NCCL's calls. nccl_poll makes the device that of the calling thread, and returns 1
     * if all calls on this stream have ended, 0 if not, or an error. Thread: any, beside steps.
     * NULL, all four: the device takes no weights over NCCL. Without options.can_sleep they must
     * not be called. */
    void *(*nccl_memory)(const toka_device *d, size_t bytes, toka_err *e);
    void *(*nccl_stream)(const toka_device *d);
    void (*nccl_free)(void *memory);
    int (*nccl_poll)(const toka_device *d, toka_err *e);

    /* ---- Groups of ranks ----
     * Each rank is a device with one thread, which calls its ops. All ranks run the same steps in
     * the same order. An op that waits for other ranks fails if the group is aborted, or if no rank
     * makes progress for 30 s (watchdog). Then every device of the group stores an error that names
     * the rank and the op. On GPUs, open waits for the other ranks, too; only an abort ends that.
     * A device may be closed when its thread is in no op, a group when its devices are closed.
     * toka_group_abort and toka_group_watchdog end and watch a group (rank runtime). NULL, all: the
     * backend has one rank. */
    int (*group_open)(toka_group **out, int tp_size, int pp_size, toka_err *e);
    void (*group_close)(toka_group *g);
    /* x [rows][E] = sum of x over the tensor ranks of the stage, added in the order of the ranks.
     * PARTIAL becomes WHOLE; DELTA, too, after the norm; SCATTERED stays, the next op completes
     * it. */
    void (*all_reduce)(toka_device *d, toka_hidden *x, int rows);
    /* Sends x [rows][E] to the same tensor rank of the next stage. */
    void (*send)(toka_device *d, toka_hidden *x, int rows);
    /* Receives x [rows][E] from the same tensor rank of the previous stage. */
    void (*receive)(toka_device *d, toka_hidden *x, int rows);

    /* ---- Steps ----
     * For each step, the rank's thread calls begin, the ops and end; later it calls finish, in the
     * order of the steps. On a backend with finish, ops may return before their work is done; the
     * device does the work in the order of the calls. finish waits until the step is done; then the
     * step's results are valid. The step, the memory that it points to, and its results must not
     * change or move from begin until finish returns. At most max_in_flight steps are begun and not
     * finished. finish is called for every step that was begun, also after an error, and also on
     * ranks without results. begin, end and finish are NULL if each op has done its work when it
     * returns. end completes x if no op has (SCATTERED).
     * If a row of the step awaits its mask, the step is held: before its norm_logits_sample (or the
     * norm_pool before that) finish may be called for earlier steps. So the device must be able to
     * run the ops before it, although it does not know the masks yet. */
    void (*begin)(toka_device *d, const toka_step *s);
    void (*end)(toka_device *d, const toka_step *s, toka_hidden *x);
    void (*finish)(toka_device *d, const toka_step *s);
    /* Records CUDA graphs. The caller calls capture after open and alloc until it returns NULL, and
     * calls begin, the ops and end, but not finish, for each step that it returns: the device
     * records these ops as a CUDA graph and runs nothing. capture is NULL if the backend records
     * nothing. */
    const toka_step *(*capture)(toka_device *d);
    /* Thread: that of the rank, after finish. NULL: the device has no clock. */
    void (*times)(toka_device *d, toka_times *times);

    /* ---- Ops ----
     * x: [T][E] residual stream (allocated with E rounded up to 8, so that a backend may pad rows).
     * q: [T][H][D], o: [T][H][Dv], or as wide as toka_q_width and toka_o_width say. All in the
     * backend's activation type: float32 on the CPU, bf16 on CUDA.
     * layer: index in the rank's layers; it also selects the layer's K and V in the pages.
     * Tensor ranks: embed, out_residual and norm_mlp_residual leave x PARTIAL, DELTA or SCATTERED,
     * and the caller must call all_reduce. embed writes zeros for the ids of other ranks. PARTIAL:
     * tensor rank 0 has added the old x. SCATTERED: each row's owner adds it. Tensor rank 0 adds
     * the bias.
     * Every tensor rank gets all results; the raw logits go to s->logits of tensor rank 0's step.
     * Stages: embed is called on the first stage only; it waits for the tokens of s->needs_step.
     * norm_logits_sample is called on the last stage only. */

    /* Copies the pages of toka_layer_copies in all layers of this rank, and in the last stage the
     * token ids of those of s->copies (keep_ids); before all other ops of the step. Called if
     * n_copies > 0. */
    void (*copy_pages)(toka_device *d, const toka_step *s);
    /* x = embed[ids]; of a head as toka_head says, with aux_from */
    void (*embed)(toka_device *d, const toka_step *s, toka_hidden *x);
    /* Stores the ids of the step's tokens at s->kv_slot, beside their K and V. Penalties and bad
     * words read the tokens of a sequence there, so the host need not know them yet. On the last
     * stage only, where the logits are; after embed or receive, in every step. */
    void (*keep_ids)(toka_device *d, const toka_step *s);
    /* Keeps x of the step's tokens at s->kv_slot, as it is before layer aux_layers[i]; copy_pages
     * copies it, too. NULL: the backend has no heads, nor the next ops what heads need. */
    void (*keep_aux)(toka_device *d, const toka_step *s, int i, const toka_hidden *x);
    /* q = RoPE(norm(x) W_q), with mla the absorbed query; K and V of the step's tokens, with mla
     * their latent vectors, are stored at s->kv_slot. With q_gate, q has each head's gate behind
     * its query, [H][2][D]. With linear q is W norm(x), and nothing is stored. */
    void (*norm_qkv_rope_kv)(toka_device *d, const toka_step *s, int layer, toka_hidden *x,
                             toka_dev_ptr q);
    /* o = softmax(attn_scale q K^T) V over the spans; with q_gate times sigmoid(gate). With linear
     * all of the mixer but W and W_o, for the rows of s->states; it may overwrite q. */
    void (*attention)(toka_device *d, const toka_step *s, int layer, toka_dev_ptr q,
                      toka_dev_ptr o);
    /* x += o W_o (+ bias), with linear that of the linear mixer; with mla x += (o W_uv) W_o; with
     * attn_post_norm x += norm(o W_o) */
    void (*out_residual)(toka_device *d, const toka_step *s, int layer, toka_dev_ptr o,
                         toka_hidden *x);
    /* x += the feed-forward of norm(x): down(activation(gate, up)), or the experts' weighted sum;
     * with mlp_post_norm x += norm of it */
    void (*norm_mlp_residual)(toka_device *d, const toka_step *s, int layer, toka_hidden *x);
    /* results: host memory [n_samples], valid after finish */
    void (*norm_logits_sample)(toka_device *d, const toka_step *s, toka_hidden *x,
                               toka_sample_result *results);
    /* sum += norm(x) of each row of s->pools; tensor rank 0 adds. On the last stage only, before
     * norm_logits_sample, if n_pools > 0. NULL: the backend does not pool. */
    void (*norm_pool)(toka_device *d, const toka_step *s, toka_hidden *x);
    /* Measures every op at the shapes of known models, without a model. The first row is the read
     * bandwidth. NULL: not available. */
    int (*bench)(toka_bench_fn *row, void *user, toka_err *e);

    /* ---- Properties ---- */
    size_t activation_bytes; /* bytes of one element of x, q and o, and of K and V that are not
                                FP8 */
    int page_tok;            /* tokens of a KV page: toka_shape.B */
    bool has_windowed;       /* layers with a window may have a pool of their own (n_windowed) */
    bool v_in_k;             /* with MLA the pages have the latent vectors once: V is a part of K */
    bool reads_files;        /* ops read the weights in the mapped files; else open copies them */
    bool warm_up;            /* run the largest step once at open: proves that memory suffices, and
                                loads the code */
    int default_tokens, default_seqs; /* default max_num_batched_tokens and max_num_seqs */
    int max_in_flight; /* most steps that may be posted and not committed, and most that may be
                          begun and not finished; 1: the host waits for each step */
    bool holds_ranks;  /* steps of several ranks may be held (toka_sample_row.awaits_mask) */
    bool has_drafts;   /* several rows of a sequence may be sampled in a step, as drafts need */
    /* Costs of attention, in units of the time that one row takes to read K and V of one token.
     * Chapter 21 chooses the shared spans by them. */
    int merge_cost;     /* cost: to merge one more partial result into a row */
    int span_cost;      /* cost: one more span */
    int rows_per_read;  /* not a cost: rows that share one read of K and V */
    int span_align_tok; /* a span may begin inside a page, at a multiple of this number of tokens;
                           0: only at the start of a page */
    int state_chunk; /* changes of so many tokens that a state keeps until they are
                        added to S; 0: each is added at once */
} toka_backend;

/* ---- Rank runtime: chapter 29 of toka.c --------------------------------------------------------
 * How the ranks of a model wait for each other, fail together, and find the rank that hangs: one
 * mechanism for threads on a CPU and for GPUs. A backend begins its own struct of a group with a
 * toka_group and passes it to these functions. It adds hooks for what only its devices know. */

#ifdef __cplusplus
#define TOKA_ATOMIC(type) type /* C++ code accesses such a field by the __atomic builtins */
#else
#define TOKA_ATOMIC(type) _Atomic(type)
#endif

enum {
    TOKA_MAX_RANKS = 64,   /* most ranks of a group */
    TOKA_MAX_MESSAGES = 4  /* most messages that a channel can hold */
};

typedef enum toka_wait { /* the thread of a rank waits until ... */
    TOKA_WAIT_NONE,
    TOKA_WAIT_OPEN,       /* all ranks have joined the group */
    TOKA_WAIT_BARRIER,    /* the other ranks of its tp group arrive, or depart */
    TOKA_WAIT_PREV_STAGE, /* the previous stage sends a step */
    TOKA_WAIT_NEXT_STAGE, /* the next stage receives a step, which makes room in the channel */
    TOKA_WAIT_SAMPLED     /* the last stage samples the ids that embed, keep_ids need */
} toka_wait;

typedef struct toka_stream_wait { /* a device's stream waits for another rank */
    void *reached; /* the backend's event: the stream has come to the wait */
    void *ended;   /* the backend's event: the stream has passed the wait */
    int rank;      /* the rank it waits for */
} toka_stream_wait;

typedef struct toka_rank { /* of one rank: what the other ranks and the watchdog read */
    TOKA_ATOMIC(bool) joined;         /* stays true after the rank's device is closed */
    TOKA_ATOMIC(int) waits_for;       /* enum toka_wait */
    TOKA_ATOMIC(const char *) op;     /* the op that its thread runs or ran last; NULL: none yet */
    TOKA_ATOMIC(int64_t) n_barriers;  /* barriers at which its thread arrived. On a GPU: barriers
                                         that its thread has enqueued */
    /* Its channel to the same tp rank of the next stage: messages that were put in, taken out. */
    TOKA_ATOMIC(int64_t) n_sent, n_received;
    int n_rows[TOKA_MAX_MESSAGES];    /* of each message in the channel */
    /* Under the lock. Wait i is entry i % n_messages: a stream has at most one wait a step. */
    int64_t n_stream_waits;
    toka_stream_wait stream_waits[TOKA_MAX_MESSAGES];
} toka_rank;

typedef struct toka_group_kind { /* a backend's groups, and its hooks */
    const char *name; /* begins every message */
    int max_tp;       /* most tensor ranks of a stage */
    int n_messages;   /* messages that a channel holds, at most TOKA_MAX_MESSAGES */
    /* The hooks are NULL if ops have done their work when they return. The lock is held. */
    /* Returns whether the event has not happened yet. */
    bool (*is_pending)(void *event);
    /* Returns the number of the barrier at which the device of the rank arrived last, or (departed)
     * from which it departed last. */
    unsigned (*barrier)(toka_group *g, int rank, bool departed);
    /* Returns the op that the device of the rank is in; NULL: the same as its thread. */
    const char *(*device_op)(toka_group *g, int rank);
    /* The group broke: makes the kernels that wait for another rank stop waiting. */
    void (*release)(toka_group *g);
} toka_group_kind;

struct toka_group {
    const toka_group_kind *kind;
    int tp_size, pp_size;
    double watchdog_s;      /* watchdog timeout; tests set less */
    double stalled_s;       /* toka_group_watchdog only: seconds since last_progress changed */
    uint64_t last_progress; /* toka_group_watchdog only: `progress` when it was called last */
    TOKA_ATOMIC(uint64_t) progress; /* rises as long as any thread makes progress */
    TOKA_ATOMIC(bool) broken;       /* it was aborted, failed or timed out; it stays broken */
    TOKA_ATOMIC(int64_t) n_joined, n_closing; /* ranks that joined; those of them that close */
    TOKA_ATOMIC(int64_t) last_sampled_step;   /* last step whose sampled ids are on their way */
    /* [pp_size] sums over all barriers and ranks of a stage */
    TOKA_ATOMIC(int64_t) n_arrived[TOKA_MAX_RANKS];
    TOKA_ATOMIC(int64_t) n_departed[TOKA_MAX_RANKS];
    pthread_mutex_t lock;   /* guards fields set at open, changes of counters and broken, and the
                               fields below */
    pthread_cond_t changed; /* a counter or `broken` changed */
    int n_sleeping;         /* ranks that wait for `changed` */
    bool hung;              /* a device did not finish its work, or a rank did not close in time: it
                               may still use memory of others, so no rank frees any */
    toka_err error;         /* why the group is broken; code 0: it was aborted */
    toka_rank ranks[TOKA_MAX_RANKS]; /* [pp_size][tp_size] */
};

/* Initializes a zeroed group. toka_group_free frees what the group owns, not the struct. */
int toka_group_init(toka_group *g, const toka_group_kind *kind, int tp, int pp, toka_err *e);
void toka_group_free(toka_group *g);

/* Breaks the group: all waits of its ranks end, and their ops fail. Thread: any. */
void toka_group_abort(toka_group *g);
/* The same, with this error, unless the group has an earlier one. */
void toka_group_fail(toka_group *g, const toka_err *e);
bool toka_group_is_broken(toka_group *g);
/* Copies the error of a broken group. If it was aborted, the error names this rank and its op. */
void toka_group_error(toka_group *g, int rank, toka_err *e);
/* Checks whether any rank has made progress, for a thread that waits for a step of all ranks; it
 * calls this again and again, one thread at a time. rank: a rank that has not finished the step;
 * waited_s: seconds since the last call. If no rank has made progress for watchdog_s seconds,
 * breaks the group and returns an error that names the rank for which the others wait; else
 * returns 0. */
int toka_group_watchdog(toka_group *g, int rank, double waited_s, toka_err *e);
/* Writes "rank 3 (stage 1, tensor rank 1)". */
void toka_rank_name(const toka_group *g, int rank, char name[64]);

/* Reads an environment variable that injects a fault. Returns its number N if it names the rank of
 * this device, else 0. "N" names all ranks of the first stage, "N@R" names rank R. */
int toka_debug_option(const char *name, const toka_device_options *options);

/* Takes the rank's place in the group. Returns TOKA_E_USE if the place is taken. */
int toka_group_join(toka_group *g, int rank, toka_err *e);
/* Waits until all ranks have joined. Returns false if the group broke. There is no timeout: a rank
 * may load weights for minutes. */
bool toka_group_wait_joined(toka_group *g, int rank);
/* Called before a rank frees memory that others use: waits until all ranks that joined have called
 * it. idle: the rank's device has finished its work. Returns false if the group is hung. */
bool toka_group_leave(toka_group *g, int rank, bool idle);

/* Every op calls it first. Returns false if the group is broken: the op does nothing then. */
bool toka_group_begin_op(toka_group *g, int rank, const char *op);
/* Notes that the thread made progress. */
void toka_group_progress(toka_group *g);
/* Notes that the stream of the rank's device has begun to wait for another rank. */
void toka_group_note_wait(toka_group *g, int rank, toka_stream_wait wait);

/* A channel holds messages 0, 1, 2 ... from a rank to the same tp rank of the next stage. The begin
 * functions return the number of the message to send or to receive, or -1 if the group broke. They
 * wait for room in the channel, or for a message. */
int64_t toka_channel_begin_send(toka_group *g, int rank);
void toka_channel_end_send(toka_group *g, int rank, int n_rows);
int64_t toka_channel_begin_receive(toka_group *g, int rank, int n_rows); /* rank: the receiver */
void toka_channel_end_receive(toka_group *g, int rank);

/* Waits until the last stage has announced the sampled ids of this step. Returns false if the group
 * broke. */
bool toka_group_wait_sampled(toka_group *g, int rank, int64_t step);
void toka_group_set_sampled(toka_group *g, int64_t step);

/* ---- A GPU's memory and steps ------------------------------------------------------------------
 * The CUDA backend sizes its memory by these before it allocates. `toka plan` uses them for GPUs
 * that this machine does not have. */

enum {
    TOKA_GPU_PAGE_TOK = 64,     /* page_tok of toka_cuda */
    TOKA_GPU_MAX_TP = 8,        /* most tensor ranks of a stage */
    TOKA_GPU_LINK_BUFFERS = 3,  /* most x in flight from one stage to the next */
    TOKA_GPU_SCATTER_BYTES = 4 << 20, /* if x is this large or larger, GEMM kernels on Hopper send
                                         their partial sums to the other tensor ranks while they
                                         compute */
    TOKA_GPU_DEFAULT_TOKENS = 8448, /* max_num_batched_tokens: 66 * 128 rows. The 128-row tiles of
                                     * a GEMM then fill the 132 multiprocessors in whole waves, if
                                     * its number of columns is a multiple of 1,024 */
    TOKA_GPU_DEFAULT_SEQS = 8192    /* max_num_seqs */
};

/* Returns the bytes of a matrix on the device, rows and columns rounded up to 8: bf16; FP8 with a
 * scale a row, and columns rounded up to 16; or MXFP4 with its scales. int4 becomes bf16 there. An
 * absent matrix has 0. */
static inline size_t toka_gpu_matrix_bytes(const toka_tensor *t) {
    const size_t rows = ((size_t)t->rows + 7) / 8 * 8, cols = ((size_t)t->cols + 7) / 8 * 8;
    if (t->dtype == TOKA_FP8) return rows * (((size_t)t->cols + 15) / 16 * 16 + 4);
    if (t->dtype != TOKA_MXFP4 || !rows) return rows * cols * 2;
    return rows * (cols / 2 + ((size_t)t->cols - 1) / 32 + 1);
}
static inline size_t toka_gpu_mlp_bytes(const toka_mlp *m) {
    return toka_gpu_matrix_bytes(&m->gate) + toka_gpu_matrix_bytes(&m->up) +
           toka_gpu_matrix_bytes(&m->down);
}
/* Returns the bytes of a layer's matrices, without norms and biases. */
static inline size_t toka_gpu_layer_bytes(const toka_layer *l) {
    size_t bytes = toka_gpu_matrix_bytes(&l->q) + toka_gpu_matrix_bytes(&l->k) +
                   toka_gpu_matrix_bytes(&l->v) + toka_gpu_matrix_bytes(&l->o) +
                   toka_gpu_mlp_bytes(&l->mlp);
    if (l->mla)
        bytes += toka_gpu_matrix_bytes(&l->mla->q_a) + toka_gpu_matrix_bytes(&l->mla->q_b) +
                 toka_gpu_matrix_bytes(&l->mla->kv_a) + toka_gpu_matrix_bytes(&l->mla->kv_b);
    if (l->linear) {
        const toka_linear *linear = l->linear;
        const toka_tensor *all[] = {&linear->qkvz, &linear->ba, &linear->q, &linear->k, &linear->v,
                                    &linear->z,    &linear->b,  &linear->a, &linear->o};
        for (int i = 0; i < 9; i++) bytes += toka_gpu_matrix_bytes(all[i]);
    }
    if (l->moe)
        bytes += toka_gpu_matrix_bytes(&l->moe->router) + toka_gpu_mlp_bytes(&l->moe->shared);
    for (int i = 0; l->moe && i < l->moe->n_experts; i++)
        bytes += toka_gpu_mlp_bytes(&l->moe->experts[i]);
    return bytes;
}
/* Returns the bytes of everything but the weights and the KV pool, with the code of the CUDA driver
 * and libraries. */
static inline size_t toka_gpu_scratch_bytes(const toka_shape *shape, int max_tokens) {
    size_t heads = (size_t)(shape->H + 2 * shape->K) * shape->D;
    size_t row = 2 * (size_t)shape->E + 2 * (size_t)shape->H * shape->D + heads + shape->F +
                 (size_t)shape->expert_cols;
    /* partial results of earlier spans, for one row, float32 */
    size_t attention = (size_t)shape->H * (shape->D + 1) * 4;
    return (size_t)max_tokens * (row * 2 + attention) +
           (size_t)shape->max_len * shape->D / 2 * 8 + ((size_t)1536 << 20);
}
/* Returns what GPUs do not have of a layer that several tensor ranks compute; NULL: they have all
 * of it. */
static inline const char *toka_gpu_missing_of_ranks(const toka_shape *shape,
                                                    const toka_layer *layer) {
    const bool all_heads = layer->q_norm_all || layer->k_norm_all ||
                           (layer->q_norm.rows && layer->q_norm.cols != shape->D) ||
                           (layer->k_norm.rows && layer->k_norm.cols != shape->D);
    return layer->mla   ? "multi-head latent attention (MLA)"
           : layer->moe ? "experts"
           : layer->attn_post_norm.rows || layer->mlp_post_norm.rows
               ? "norms behind attention and MLP"
           : !layer->attn_norm.rows || !layer->mlp_norm.rows ? "layers without a norm before them"
           : all_heads                                       ? "one norm of all heads"
                                                             : NULL;
}
/* Returns what GPUs before compute capability 9.0 do not have of a layer, with its verb; NULL: they
 * have all of it. */
static inline const char *toka_gpu_needs_hopper(const toka_layer *layer) {
    return layer->moe      ? "experts need"
           : layer->mla    ? "multi-head latent attention (MLA) needs"
           : layer->kv_fp8 ? "FP8 K and V need"
                           : NULL;
}
static inline bool toka_gpu_has_gelu(const toka_layer *layer) {
    return !layer->moe && layer->activation == TOKA_GELU_TANH;
}
/* Returns the bytes that depend on the kinds of the layers: RoPE tables of all kinds of RoPE but
 * the first, and gate and up of layers with GELU. */
static inline size_t toka_gpu_kinds_bytes(const toka_shape *shape, const toka_layer *layers,
                                          int max_tokens) {
    size_t n_ropes = 0, mlp_cols = 0;
    for (int i = 0; i < shape->L; i++) {
        int same = 0;
        while (layers[same].rope != layers[i].rope) same++;
        n_ropes += i > 0 && same == i;
        if (toka_gpu_has_gelu(&layers[i])) mlp_cols = 2 * (size_t)shape->F;
    }
    return n_ropes * (size_t)shape->max_len * (size_t)shape->D / 2 * 8 +
           (size_t)max_tokens * mlp_cols * 2;
}
/* Returns the bytes of the bf16 copies of FP8 pages for the attention of prompts and shared
 * prefixes: a sequence of max_len tokens, and at least 65,536 tokens. */
static inline size_t toka_gpu_unpacked_bytes(const toka_shape *shape) {
    const size_t B = TOKA_GPU_PAGE_TOK, n = (size_t)shape->max_len / B + 2;
    return (n > 1024 ? n : 1024) * 4 * (size_t)shape->K * B * (size_t)shape->D;
}
/* Returns the bytes that a rank needs in addition to talk to other ranks: for all-reduces and
 * gathered logits of the tensor ranks, and for x from stage to stage. */
static inline size_t toka_gpu_group_bytes(const toka_shape *shape, int max_tokens, int tp, int pp) {
    size_t x = (size_t)max_tokens * (((size_t)shape->E + 7) / 8 * 8) * 2;
    return (tp > 1 ? x + ((size_t)256 << 20) : 0) + (pp > 1 ? (TOKA_GPU_LINK_BUFFERS + 1) * x : 0);
}
/* Returns the share of the free memory that may be allocated; asked 0: the default. */
static inline double toka_gpu_utilization(double asked) { return asked > 0 ? asked : 0.9; }

extern const toka_backend toka_plain;
extern const toka_backend toka_cpu;
#ifdef TOKA_WITH_CUDA
extern const toka_backend toka_cuda;
#endif
#endif /* TOKA_INTERNAL */

#ifdef __cplusplus
}
#endif
#endif
