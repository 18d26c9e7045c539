/* soak.c - a stress test: an adversarial mix of requests against any model, and checks of what must
 * always hold. It uses only the public API.
 *   cc -O2 -c toka.c && cc -O2 -I. test/soak.c toka.o -lm -lpthread -o soak
 *   ./soak --model test/model --seconds 15 --seed 1
 *
 * Threads submit, generate, score and cancel while other threads drive. The KV cache is tiny, so
 * that samples are preempted all the time. A request is a pure function of the seed and its number,
 * except for prompts that continue an earlier output (those are kept). The moment of a cancel
 * depends on the threads. Limits and threads that no flag sets come from the seed, too. Checked:
 *   - every sample of an accepted request has exactly one final event, and no event after it;
 *   - counts of tokens, finish reasons, stop strings, bad words, allowed ids, log-probabilities and
 *     texts fit the request;
 *   - callbacks come one at a time, `more` is right, a prompt's events come in order and before
 *     those of sample 0;
 *   - whenever no request is active: nothing runs or waits, no KV page is used, the statistics add
 *     up, and memory has not grown since the warm-up;
 *   - closing the engine ends all active requests;
 *   - a random part of all requests is run again alone, on a fresh engine with space for everything
 *     and without sharing. It must give the same ids, log-probabilities and texts to the last bit (a
 *     cancelled sample: their beginning). On a GPU differences are only counted, because its sums
 *     depend on the batch.
 * Prints one line at the end. If anything was wrong, it exits with 1 and prints the command that
 * repeats the run. */
#define _GNU_SOURCE
#include "toka.h"

#include <errno.h>
#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 40, KEEP = 6, BIG = 4096, DOCS = 6, N_CONTINUED = 8, RECORDS = 1024, SUBMITTERS = 3, MAX_STOPS = 3, EXTREMES = 4 };
#define MIX 0.6 /* share of the time; the rest is for running again */
#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* ---- Random numbers, time, growable bytes ---- */

typedef struct rng {
    uint64_t s;
} rng;

static uint64_t next(rng *r) { /* splitmix64 */
    uint64_t z = r->s += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}
static int below(rng *r, int n) { return n > 0 ? (int)(next(r) % (uint64_t)n) : 0; }
static int between(rng *r, int low, int high) { return low + below(r, high - low + 1); }
static bool chance(rng *r, int percent) { return below(r, 100) < percent; }
static float real(rng *r, double low, double high) { return (float)(low + (high - low) * (double)(next(r) >> 11) * 0x1p-53); }
/* Independent streams for different (seed, a, b). */
static rng stream(uint64_t seed, uint64_t a, uint64_t b) {
    rng r = {seed};
    r.s = next(&r) ^ a * 0xD1342543DE82EF95u;
    r.s = next(&r) ^ b;
    next(&r);
    return r;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

typedef struct vec {
    char *p;
    size_t n, cap;
} vec;

static void *need(void *p) {
    if (!p) fputs("soak: out of memory\n", stderr), abort();
    return p;
}
static void put(vec *v, const void *p, size_t n) {
    if (v->cap < v->n + n) v->p = need(realloc(v->p, v->cap = (v->n + n) * 2));
    if (n) memcpy(v->p + v->n, p, n);
    v->n += n;
}
static void drop(vec *v) { free(v->p), *v = (vec){0}; }

/* ---- Requests, results, and the shared state ---- */

typedef struct token { /* one event's token, compared bit by bit */
    int32_t id;
    float logprob, sampled_logprob;
    uint32_t top; /* a hash of the top ids and their log-probabilities */
} token;

typedef struct sample_result { /* the result of one sample */
    vec tokens, text;
    toka_finish finish;
    int stop_id, stop_text;
} sample_result;

/* The result of a request: the prompt's log-probabilities and its first KEEP samples. */
typedef struct request_result {
    int64_t number;
    bool scored; /* from toka_score: only the log-probabilities in `places` are set */
    bool ended;  /* no sample was cancelled */
    vec prompt;  /* int32_t */
    vec places;  /* token */
    sample_result samples[KEEP];
} request_result;

enum { SUBMIT, GENERATE, SCORE };

typedef struct job { /* a request and what the test does with it */
    toka_request r;
    int32_t *prompt; /* [max_len + 1] */
    int n_prompt;
    char text[400], stop_text[MAX_STOPS][16];
    const char *stop[MAX_STOPS];
    int32_t stop_ids[3], bias_ids[6], allowed[40], bad[12];
    float bias[6];
    int bad_lengths[6];
    int how;
    bool wrong;       /* must be refused */
    int cancel_event; /* the callback ends the request at this event; 0: never */
    bool by_return;   /* by its return value, not by toka_cancel */
    bool at_once;     /* cancelled right after toka_submit */
    int follow_event; /* the callback submits another request at this event; 0: never */
} job;

typedef struct slot { /* an active request */
    int64_t number;   /* number % SLOTS is this slot; an event for another number comes too late */
    int64_t id;       /* 0: not yet known */
    bool taken;
    job j;
    request_result o;
    int n_events, n_live, n_cancelled, n_tokens, n_places;
    bool over;       /* its callback asked for the end: no token may come */
    int events_left; /* this many more events may come; -1: no limit */
    struct {
        int n;
        bool ended;
    } *samples; /* [n] */
} slot;

static struct {
    uint64_t seed;
    double seconds, hang_s;
    toka_options o;
    bool exact, has_tok, two_drivers, forever;
    toka *t;
    toka_words *words; /* shared by some requests, as are: */
    toka_constraint *constraints[3];
    toka_info info;
    vec docs[DOCS];       /* int32_t, max_len each */
    pthread_mutex_t lock; /* guards the fields below; toka is never called under it */
    slot slots[SLOTS];
    int n_taken;
    vec continued_prompts[N_CONTINUED]; /* int32_t: prompts with outputs, to continue from */
    request_result records[RECORDS];    /* a random part of the ended requests */
    int64_t n_ended;
    int64_t n_accepted, n_refused, n_samples;
    atomic_llong n_tokens, n_events, n_cancelled, n_stopped, last_id;
    atomic_bool pause, quit, in_callback;
    atomic_int n_wrong;
    /* the last event had `more`, so the next event must be of this slot; used by the driver */
    slot *expected;
    char command[600];
} S;

__attribute__((format(printf, 1, 2))) static void wrong(const char *fmt, ...) {
    char line[600];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    fprintf(stderr, "soak: %s\n", line);
    if (++S.n_wrong == 10) fprintf(stderr, "soak: and so on; again with: %s\n", S.command), _exit(1);
}
#define EXPECT(condition, ...) ((condition) ? (void)0 : wrong(__VA_ARGS__))

static void die(const toka_err *e) {
    fprintf(stderr, "soak: %s\n", e->msg);
    exit(1);
}

/* ---- Prompts ---- */

static void random_text(rng *r, char *z, size_t cap) {
    static const char *const names[] = {"Tom", "Anna", "Lily", "Sam", "Zo\xC3\xAB", "\xE5\xB0\x8F\xE6\x98\x8E"};
    static const char *const things[] = {"apples", "books", "coins", "cards", "pens", "\xF0\x9F\x8D\x8E"};
    const char *who = names[below(r, COUNT(names))], *what = things[below(r, COUNT(things))];
    snprintf(z, cap, "%s has %d %s. %s buys %d more %s. How many %s does %s have now?\n", who, between(r, 2, 99), what, who,
             between(r, 2, 99), what, what, who);
}

static void make_docs(void) {
    for (int d = 0; d < DOCS; d++) {
        rng r = stream(S.seed, 1, (uint64_t)d);
        while (S.docs[d].n < (size_t)S.info.max_model_len * sizeof(int32_t)) {
            char z[200];
            int32_t *ids = NULL, id = below(&r, S.info.vocab_size);
            size_t n = 0;
            toka_err e;
            random_text(&r, z, sizeof z);
            if (S.has_tok && d && toka_encode(S.t, z, strlen(z), 0, &ids, &n, &e)) die(&e);
            if (n) put(&S.docs[d], ids, n * sizeof *ids);
            else put(&S.docs[d], &id, sizeof id);
            free(ids);
        }
    }
}

/* A length that is often at a page boundary or at the limit of the context. */
static int make_length(rng *r, int max_len) {
    int n = chance(r, 50) ? between(r, 1, 60) : chance(r, 90) ? 16 * between(r, 1, 9) + between(r, -1, 1) : between(r, 1, max_len);
    return MIN(n, max_len);
}

static void make_prompt(job *j, rng *r, int max_len) {
    const vec *doc = &S.docs[below(r, DOCS)];
    int kind = below(r, 100), n = make_length(r, max_len), V = S.info.vocab_size;
    j->r.ids = j->prompt;
    if (kind < 10) n = 1;
    if (kind >= 10 && kind < 13) n = max_len;
    memcpy(j->prompt, doc->p, (size_t)n * sizeof *j->prompt);
    if (kind >= 30 && kind < 60) /* its end differs */
        for (int i = n, n_own = between(r, 1, 20); i > 0 && n_own; n_own--) j->prompt[--i] = below(r, V);
    if (kind >= 60 && kind < 85) {
        pthread_mutex_lock(&S.lock);
        const vec *v = &S.continued_prompts[below(r, N_CONTINUED)];
        if (v->n) n = MIN((int)(v->n / sizeof *j->prompt), max_len), memcpy(j->prompt, v->p, (size_t)n * sizeof *j->prompt);
        pthread_mutex_unlock(&S.lock);
        if (chance(r, 50)) n = between(r, (n + 1) / 2, n);
        if (chance(r, 50)) j->prompt[n - 1] = below(r, V);
    }
    if (kind >= 85 && S.has_tok) {
        int32_t *ids;
        size_t n_ids;
        toka_err e;
        random_text(r, j->text, sizeof j->text);
        if (toka_encode(S.t, j->text, strlen(j->text), TOKA_ADD_SPECIAL | TOKA_PARSE_SPECIAL, &ids, &n_ids, &e)) die(&e);
        if (n_ids && n_ids <= (size_t)max_len) {
            n = (int)n_ids, memcpy(j->prompt, ids, n_ids * sizeof *ids);
            j->r.ids = NULL, j->r.text = j->text, j->r.text_bytes = strlen(j->text);
        }
        free(ids);
    }
    j->n_prompt = n;
    j->r.n_ids = (size_t)n;
}

/* ---- Sampling parameters: a function of the seed, the number and the prompt ---- */

static int32_t some_id(const job *j, rng *r) { /* half of them are ids that matter */
    const vec *doc = &S.docs[below(r, DOCS)];
    if (chance(r, 25)) return j->prompt[below(r, j->n_prompt)];
    return chance(r, 50) ? ((const int32_t *)doc->p)[below(r, MIN(80, S.info.max_model_len))] : below(r, S.info.vocab_size);
}

/* Stop strings and stop ids. Most strings are the text of two tokens, so that they span tokens. */
static void make_stops(job *j, rng *r) {
    static const char *const common[] = {"a", "e", "th", " h", "1", "2", ".", "\n", "oo", "\xC3\xAB", "now", "has 1"};
    toka_sampling *s = &j->r.sampling;
    int n = S.has_tok ? between(r, 0, MAX_STOPS) : 0;
    for (int i = 0; i < n; i++) {
        int32_t id[2] = {some_id(j, r), some_id(j, r)};
        char *text = NULL;
        size_t bytes = 0;
        toka_err e;
        if (toka_decode(S.t, id, 2, TOKA_SKIP_SPECIAL, &text, &bytes, &e)) die(&e);
        bool fits = bytes && bytes < sizeof j->stop_text[0] && strlen(text) == bytes && !strstr(text, "\xEF\xBF\xBD");
        const char *word = fits && chance(r, 60) ? text : common[below(r, COUNT(common))];
        snprintf(j->stop_text[i], sizeof j->stop_text[i], "%s", word);
        j->stop[i] = j->stop_text[i];
        free(text);
    }
    s->stop = j->stop, s->n_stop = n, s->include_stop = chance(r, 30);
    s->n_stop_ids = chance(r, 50) ? between(r, 1, 3) : 0, s->stop_ids = j->stop_ids;
    for (int i = 0; i < s->n_stop_ids; i++) j->stop_ids[i] = some_id(j, r);
}

static void make_masks(job *j, rng *r) {
    toka_sampling *s = &j->r.sampling;
    int32_t end = s->n_stop_ids ? j->stop_ids[0] : S.info.eos_id;
    /* ends as soon as it may */
    if (s->min_tokens && end >= 0 && end < S.info.vocab_size && chance(r, 50))
        s->n_bias = 1, s->bias_ids = j->bias_ids, s->bias_values = j->bias, j->bias_ids[0] = end, j->bias[0] = 60;
    if (chance(r, 25)) {
        s->n_bias = between(r, 1, COUNT(j->bias)), s->bias_ids = j->bias_ids, s->bias_values = j->bias;
        for (int i = 0; i < s->n_bias; i++) j->bias_ids[i] = some_id(j, r), j->bias[i] = real(r, -100, 12);
        /* ends at a random place */
        if (S.info.eos_id >= 0 && S.info.eos_id < S.info.vocab_size && chance(r, 50))
            j->bias_ids[0] = S.info.eos_id, j->bias[0] = real(r, 0, 12);
    }
    if (chance(r, 10)) {
        s->n_allowed = between(r, 1, COUNT(j->allowed)), s->allowed_ids = j->allowed;
        for (int i = 0; i < s->n_allowed; i++) j->allowed[i] = some_id(j, r);
    }
    if (chance(r, 20)) {
        s->n_bad = between(r, 1, COUNT(j->bad_lengths)), s->bad_ids = j->bad, s->bad_lengths = j->bad_lengths;
        for (int i = 0; i < s->n_bad; i++) j->bad_lengths[i] = between(r, 1, 2);
        for (int i = 0; i < COUNT(j->bad); i++) j->bad[i] = some_id(j, r);
    }
}

static bool listed(const int32_t *list, int n, int32_t id) {
    for (int i = 0; i < n; i++)
        if (list[i] == id) return true;
    return false;
}

/* Some token must stay allowed, otherwise the request is refused. */
static void keep_some_token(job *j, rng *r) {
    const toka_sampling *s = &j->r.sampling;
    int32_t id;
    if (!s->n_allowed || (!s->n_bad && !s->min_tokens)) return;
    do id = between(r, 8, S.info.vocab_size - 1); /* ids below 8 may be further end ids */
    while (id == S.info.eos_id || listed(j->bad, COUNT(j->bad), id) || listed(s->stop_ids, s->n_stop_ids, id) || listed(s->bias_ids, s->n_bias, id));
    j->allowed[0] = id;
}

static void make_words(void) {
    static const char *const words[] = {"the", "is", "e", "3 + 4", "\n"};
    toka_err e = {0};
    static const char *const sources[] = {"{\"type\":\"array\",\"items\":{\"type\":\"string\",\"maxLength\":30}}", "[a-f0-9 ]+(\\.|!)", "[\"one\",\"one more\",\"two\"]"};
    static const int kinds[] = {TOKA_GRAMMAR_JSON_SCHEMA, TOKA_GRAMMAR_REGEX, TOKA_GRAMMAR_CHOICE};
    if (S.has_tok && toka_words_new(&S.words, S.t, words, 5, &e)) die(&e);
    for (int i = 0; i < 3 && S.has_tok; i++) {
        const toka_grammar g = {.kind = kinds[i], .text = sources[i], .text_bytes = strlen(sources[i])};
        if (toka_constraint_new(&S.constraints[i], S.t, &g, &e)) die(&e);
    }
}

static void drop_words(void) {
    toka_words_del(S.words);
    for (int i = 0; i < 3; i++) toka_constraint_del(S.constraints[i]);
}

static void make_sampling(job *j, rng *r) {
    toka_sampling *s = &j->r.sampling;
    s->temperature = chance(r, 15) ? 0 : real(r, 0.3, 3);
    s->seed = next(r);
    if (chance(r, 20)) s->top_p = real(r, 0.05, 1);
    if (chance(r, 20)) s->top_k = between(r, -1, 50);
    if (chance(r, 15)) s->min_p = real(r, 0, 0.3);
    if (chance(r, 20)) s->repetition_penalty = real(r, 0.7, 1.6);
    if (chance(r, 20)) s->presence_penalty = real(r, -2, 2);
    if (chance(r, 20)) s->frequency_penalty = real(r, -2, 2);
    if (chance(r, 40)) s->logprobs = chance(r, 50) ? TOKA_NO_LOGPROBS : between(r, 1, 6);
    if (chance(r, 15)) s->ignore_eos = 1;
    s->max_tokens = chance(r, 12) ? 1 : chance(r, 40) ? between(r, 2, 30) : chance(r, 40) ? between(r, 30, 120) : 0;
    if (chance(r, 20)) s->min_tokens = between(r, 0, s->max_tokens ? s->max_tokens : 40);
    if (chance(r, 50)) make_stops(j, r);
    make_masks(j, r), keep_some_token(j, r);
    if (S.has_tok && !s->n_allowed && chance(r, 10)) s->bad_words = S.words;
    if (S.has_tok && !s->n_allowed && !s->n_bad && !s->bad_words && chance(r, 15)) s->constraint = S.constraints[below(r, 3)];
    int kind = below(r, 100);
    j->r.n = kind < 50 ? 1 : kind < 86 ? between(r, 2, 8) : kind < 99 || chance(r, 60) ? between(r, 9, 60) : BIG;
    if (j->r.n == BIG && chance(r, 40)) s->max_tokens = 1, s->min_tokens = 0;
    if (chance(r, 10)) j->r.prompt_logprobs = 1, j->r.prompt_top = between(r, 0, 4);
    if (j->r.prompt_logprobs && chance(r, 40)) j->r.n = 0;
    j->r.keep_special = chance(r, 10), j->r.ids_only = chance(r, 15);
    j->r.priority = chance(r, 20) ? between(r, -2, 2) : 0;
}

/* ---- The life of a request ---- */

static void make_life(job *j, rng *r) {
    j->how = chance(r, 70) ? SUBMIT : chance(r, 85) ? GENERATE : SCORE;
    j->cancel_event = chance(r, 20) ? between(r, 1, chance(r, 50) ? 5 : 200) : 0;
    if (j->r.n == BIG && j->r.sampling.max_tokens != 1 && !j->cancel_event) j->cancel_event = between(r, 1, 3000);
    if (j->r.n == BIG && j->r.sampling.max_tokens == 1 && chance(r, 50)) j->cancel_event = 0;
    j->by_return = chance(r, 60);
    j->at_once = chance(r, 6);
    j->follow_event = chance(r, 10) ? between(r, 1, 10) : 0;
}

/* Makes one thing wrong, so that the request must be refused. */
static void make_wrong(job *j, rng *r) {
    static const int32_t outside[] = {1 << 30};
    toka_sampling *s = &j->r.sampling;
    j->wrong = true, j->how = chance(r, 50) ? SUBMIT : GENERATE;
    switch (below(r, 5)) {
    case 0: s->top_p = 0; break;
    case 1: s->n_stop_ids = 1, s->stop_ids = outside; break;
    case 2: j->r.n = chance(r, 50) ? -1 : 1 << 21; break;
    case 3: j->r.ids = j->prompt, j->r.n_ids = (size_t)S.info.max_model_len + 1; break;
    default: s->max_tokens = -1;
    }
}

/* The first requests are the largest ones, so that buffers that grow once have grown before memory
 * is compared. */
static void make_extreme(job *j, int which) {
    toka_sampling *s = &j->r.sampling;
    j->r.n = which < 2 ? BIG : 60, j->r.prompt_logprobs = which == 2, j->r.prompt_top = 4;
    j->how = SUBMIT, j->at_once = false, j->by_return = which & 1;
    s->max_tokens = which == 0, s->min_tokens = 0;
    j->cancel_event = 500 * which;
}

/* Makes request `number`. prompt NULL: it also makes the prompt. */
static void make_job(job *j, int64_t number, const vec *prompt) {
    int32_t *buffer = j->prompt;
    rng r = stream(S.seed, 2, (uint64_t)number), r_prompt = stream(S.seed, 3, (uint64_t)number),
        r_life = stream(S.seed, 4, (uint64_t)number);
    *j = (job){.r = toka_request_default(), .prompt = buffer};
    memset(buffer, 0, ((size_t)S.info.max_model_len + 1) * sizeof *buffer);
    if (prompt) {
        j->n_prompt = (int)(prompt->n / sizeof *buffer), memcpy(buffer, prompt->p, prompt->n);
        j->r.ids = buffer, j->r.n_ids = (size_t)j->n_prompt;
    } else {
        make_prompt(j, &r_prompt, S.info.max_model_len - 1);
    }
    make_sampling(j, &r);
    make_life(j, &r_life);
    if (number < EXTREMES) make_extreme(j, (int)number);
    else if (chance(&r_life, 3)) make_wrong(j, &r_life);
    if (j->how == SCORE) j->r.n = 0, j->r.prompt_logprobs = 1, j->r.ids = buffer, j->r.n_ids = (size_t)j->n_prompt;
}

/* ---- Checks of events ---- */

static bool utf8_ok(const char *p, size_t n) {
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)p[i++];
        int more = c < 0x80 ? 0 : c >= 0xC2 && c < 0xE0 ? 1 : c >= 0xE0 && c < 0xF0 ? 2 : c >= 0xF0 && c < 0xF5 ? 3 : -1;
        if (more < 0) return false;
        for (; more; more--)
            if (i == n || ((unsigned char)p[i++] & 0xC0) != 0x80) return false;
    }
    return true;
}

static uint32_t top_hash(const toka_event *ev) {
    uint32_t h = 2166136261u, bits;
    for (int i = 0; i < ev->n_top; i++) {
        memcpy(&bits, &ev->top_logprobs[i], sizeof bits);
        h = (h ^ (uint32_t)ev->top_ids[i]) * 16777619u, h = (h ^ bits) * 16777619u;
    }
    return h;
}

static int sample_limit(const slot *x) {
    int buffer = S.info.max_model_len - x->j.n_prompt, max_len = x->j.r.sampling.max_tokens;
    return max_len && max_len < buffer ? max_len : buffer;
}

/* Whether greedy sampling must take the best logit. */
static bool is_plain_greedy(const toka_sampling *s) {
    return s->temperature == 0 && s->repetition_penalty == 1 && s->presence_penalty == 0 && s->frequency_penalty == 0 &&
           !s->n_bias && !s->n_allowed && !s->n_bad && !s->bad_words && !s->min_tokens && !s->constraint;
}

/* asked: the number of top log-probabilities, or TOKA_NO_LOGPROBS. */
static void check_numbers(const slot *x, const toka_event *ev, int asked) {
    const int n_top = MAX(asked, 0);
    long long no = (long long)x->o.number;
    EXPECT(ev->n_top == MIN(n_top, S.info.vocab_size), "request %lld: %d best ids, asked %d", no, ev->n_top, n_top);
    EXPECT((asked < 0 ? isnan(ev->logprob) : ev->logprob <= 1e-4f) && ev->sampled_logprob <= 1e-4f, "request %lld: logprob %g, sampled %g", no, ev->logprob,
           ev->sampled_logprob);
    for (int i = 0; i < ev->n_top; i++) {
        EXPECT(ev->top_ids[i] >= 0 && ev->top_ids[i] < S.info.vocab_size, "request %lld: a best id is %d", no, ev->top_ids[i]);
        EXPECT(!i || ev->top_logprobs[i] <= ev->top_logprobs[i - 1], "request %lld: best ids out of order", no);
    }
}

static void check_place(slot *x, const toka_event *ev) {
    const job *j = &x->j;
    int at = x->n_places++;
    long long no = (long long)x->o.number;
    if (!j->r.prompt_logprobs || at >= j->n_prompt) {
        wrong("request %lld: event %d of the prompt, which has %d tokens", no, at, j->n_prompt);
        return;
    }
    bool last = !j->r.n && at == j->n_prompt - 1;
    EXPECT(ev->id == j->prompt[at], "request %lld: token %d of the prompt is %d, not %d", no, at, ev->id, j->prompt[at]);
    EXPECT(ev->finish == (last ? TOKA_LENGTH : TOKA_RUNNING), "request %lld: place %d of %d has finish %d", no, at, j->n_prompt,
           ev->finish);
    EXPECT(!x->samples[0].n || !j->r.n, "request %lld: place %d after sample 0 began", no, at);
    check_numbers(x, ev, at ? j->r.prompt_top : 0);
    put(&x->o.places, &(token){ev->id, ev->logprob, ev->sampled_logprob, top_hash(ev)}, sizeof(token));
}

static void check_finish(const slot *x, const toka_event *ev, int n) {
    const toka_sampling *s = &x->j.r.sampling;
    long long no = (long long)x->o.number;
    int limit = sample_limit(x);
    bool eos = !s->ignore_eos && ev->id == S.info.eos_id, stop_id = listed(s->stop_ids, s->n_stop_ids, ev->id);
    EXPECT(n <= limit, "request %lld: sample %d has %d tokens, at most %d were asked", no, ev->sample, n, limit);
    EXPECT(ev->stop_text < s->n_stop && (ev->stop_id < 0 || ev->stop_id == ev->id), "request %lld: stop id %d, text %d", no,
           ev->stop_id, ev->stop_text);
    if (ev->finish == TOKA_RUNNING)
        EXPECT(n < limit && !eos && !stop_id, "request %lld: sample %d runs on at token %d of %d", no, ev->sample, n, limit);
    else if (ev->finish == TOKA_LENGTH)
        EXPECT(n == limit && !eos && !stop_id, "request %lld: sample %d ends at %d tokens of %d", no, ev->sample, n, limit);
    else
        EXPECT(ev->finish == TOKA_STOP && (ev->stop_id >= 0 || ev->stop_text >= 0 || s->constraint), "request %lld: finish %d with a token", no,
               ev->finish);
    if (ev->stop_id >= 0 && !s->n_allowed)
        EXPECT(n > s->min_tokens, "request %lld: id %d ends sample %d at %d tokens, at least %d", no, ev->id, ev->sample, n,
               s->min_tokens);
    if (ev->stop_text >= 0 && ev->stop_id < 0)
        EXPECT(n > s->min_tokens, "request %lld: sample %d stops at %d tokens, at least %d", no, ev->sample, n, s->min_tokens);
}

static void check_token(slot *x, const toka_event *ev, int n) {
    const job *j = &x->j;
    const toka_sampling *s = &j->r.sampling;
    long long no = (long long)x->o.number;
    bool text = !j->r.ids_only || s->n_stop;
    EXPECT(ev->id < S.info.vocab_size, "request %lld: id %d", no, ev->id);
    EXPECT(ev->sample || !j->r.prompt_logprobs || x->n_places == j->n_prompt, "request %lld: sample 0 begins after %d places", no,
           x->n_places);
    EXPECT(!s->n_allowed || listed(s->allowed_ids, s->n_allowed, ev->id) || s->n_bad || s->min_tokens,
           "request %lld: id %d was not allowed", no, ev->id);
    EXPECT(ev->n_cached >= 0 && ev->n_cached <= j->n_prompt, "request %lld: %d of %d prompt tokens cached", no, ev->n_cached,
           j->n_prompt);
    EXPECT(!is_plain_greedy(s) || !ev->n_top || ev->id == ev->top_ids[0], "request %lld: greedy id %d is not the best, %d", no,
           ev->id, ev->top_ids[0]);
    if (S.has_tok)
        EXPECT(text ? ev->text && utf8_ok(ev->text, ev->text_bytes) : !ev->text, "request %lld: half a character, or no text",
               no);
    check_numbers(x, ev, s->logprobs);
    check_finish(x, ev, n);
    if (ev->sample >= KEEP) return;
    sample_result *k = &x->o.samples[ev->sample];
    put(&k->tokens, &(token){ev->id, ev->logprob, ev->sampled_logprob, top_hash(ev)}, sizeof(token));
    if (ev->text) put(&k->text, ev->text, ev->text_bytes);
    k->finish = ev->finish, k->stop_id = ev->stop_id, k->stop_text = ev->stop_text;
}

/* Checks a whole sample: it contains no stop string except the one that ended it, and no bad
 * word. */
static void check_sample(const slot *x, int sample) {
    const toka_sampling *s = &x->j.r.sampling;
    const sample_result *k = &x->o.samples[sample];
    const token *v = (const token *)k->tokens.p;
    int n = (int)(k->tokens.n / sizeof *v), n_bad = 0;
    long long no = (long long)x->o.number;
    for (int i = 0; i < s->n_stop && !s->min_tokens && k->text.n; i++) {
        const char *at = memmem(k->text.p, k->text.n, s->stop[i], strlen(s->stop[i]));
        bool ends = at && s->include_stop && k->stop_text >= 0 && at + strlen(s->stop[i]) == k->text.p + k->text.n;
        EXPECT(!at || ends, "request %lld: the text of sample %d has the stop string '%s' in it", no, sample, s->stop[i]);
    }
    for (int b = 0; b < s->n_bad; n_bad += s->bad_lengths[b++])
        for (int i = 0, m = s->bad_lengths[b]; i + m <= n; i++) {
            bool found = v[i].id == s->bad_ids[n_bad] && (m == 1 || v[i + 1].id == s->bad_ids[n_bad + 1]);
            EXPECT(!found, "request %lld: bad word %d at token %d of sample %d", no, b, i, sample);
        }
}

/* Checks one event of slot x. Returns true if it was the request's last one. */
static bool check_event(slot *x, const toka_event *ev) {
    const job *j = &x->j;
    long long no = (long long)x->o.number;
    bool of_prompt = ev->sample == TOKA_PROMPT;
    x->n_events++;
    EXPECT(!x->over || ev->id < 0 || !j->r.n, "request %lld: a token of sample %d after its callback ended it", no, ev->sample);
    EXPECT(ev->id < 0 || x->events_left < 0 || x->events_left-- > 0, "request %lld: toka_cancel does not end it", no);
    if (of_prompt ? !j->r.prompt_logprobs : ev->sample < 0 || ev->sample >= j->r.n) {
        wrong("request %lld: an event of sample %d of %d", no, ev->sample, j->r.n);
        return false;
    }
    int i = of_prompt ? 0 : ev->sample;
    if (x->samples[i].ended && !(of_prompt && j->r.n))
        wrong("request %lld: an event of sample %d after its last", no, ev->sample);
    if (ev->id < 0) {
        /* no token was allowed */
        const toka_sampling *s = &j->r.sampling;
        const bool none = (ev->finish == TOKA_STOP && s->n_bad && s->n_allowed) || (ev->finish != TOKA_CANCELLED && s->constraint);
        EXPECT(none || ev->finish == TOKA_CANCELLED, "request %lld: finish %d without a token", no, ev->finish);
        if (!of_prompt && i < KEEP) x->o.samples[i].finish = ev->finish;
        x->n_cancelled += !none;
    } else if (of_prompt) {
        check_place(x, ev);
    } else {
        x->n_tokens++;
        check_token(x, ev, ++x->samples[i].n);
    }
    if (ev->finish == TOKA_RUNNING) return false;
    x->samples[i].ended = true;
    if (!of_prompt && i < KEEP) check_sample(x, i);
    return --x->n_live == 0;
}

/* ---- Slots ---- */

static void request_result_free(request_result *o) {
    drop(&o->prompt), drop(&o->places);
    for (int i = 0; i < KEEP; i++) drop(&o->samples[i].tokens), drop(&o->samples[i].text);
    *o = (request_result){0};
}

static void slot_begin(slot *x, int64_t number) {
    x->o = (request_result){.number = number, .scored = x->j.how == SCORE};
    x->n_events = x->n_cancelled = x->n_tokens = x->n_places = 0;
    x->n_live = MAX(x->j.r.n, 1), x->over = false, x->events_left = -1;
    put(&x->o.prompt, x->j.prompt, (size_t)x->j.n_prompt * sizeof *x->j.prompt);
    if (!x->j.wrong) x->samples = need(calloc((size_t)x->n_live, sizeof *x->samples));
}

static slot *slot_take(rng *r) {
    slot *x = NULL;
    pthread_mutex_lock(&S.lock);
    for (int i = 0, from = below(r, SLOTS); i < SLOTS && !x && !S.pause; i++)
        if (!S.slots[(from + i) % SLOTS].taken) x = &S.slots[(from + i) % SLOTS];
    if (x) x->taken = true, x->number += SLOTS, x->id = 0, S.n_taken++;
    pthread_mutex_unlock(&S.lock);
    return x;
}

/* Keeps some results: to continue from, and to run again. */
static void slot_keep_result(slot *x) {
    rng r = stream(S.seed, 5, (uint64_t)x->number);
    const vec *v = &x->o.samples[0].tokens;
    if (chance(&r, 30)) {
        vec *p = &S.continued_prompts[below(&r, N_CONTINUED)];
        p->n = 0;
        put(p, x->o.prompt.p, x->o.prompt.n);
        for (size_t i = 0; i < v->n / sizeof(token); i++) put(p, &((const token *)v->p)[i].id, sizeof(int32_t));
    }
    uint64_t at = S.n_ended++ < RECORDS ? (uint64_t)S.n_ended - 1 : next(&r) % (uint64_t)S.n_ended;
    if (at >= RECORDS) return;
    request_result_free(&S.records[at]);
    S.records[at] = x->o;
    x->o = (request_result){0};
}

static void slot_free(slot *x, bool keep) {
    pthread_mutex_lock(&S.lock);
    x->o.ended = !x->n_cancelled;
    if (keep) slot_keep_result(x);
    request_result_free(&x->o);
    free(x->samples), x->samples = NULL;
    x->taken = false, S.n_taken--;
    pthread_mutex_unlock(&S.lock);
}

/* ---- Submitting ---- */

static void send_request(rng *r, bool may_wait);

static int on_event(void *user, const toka_event *ev) {
    int64_t number = (int64_t)(intptr_t)user;
    slot *x = &S.slots[number % SLOTS];
    EXPECT(!atomic_exchange(&S.in_callback, true), "two callbacks at once");
    EXPECT(!S.expected || S.expected == x, "`more` was set, and an event of another request came");
    S.n_events++;
    S.n_tokens += ev->sample >= 0 && ev->id >= 0;
    S.n_cancelled += ev->id < 0;
    S.n_stopped += ev->finish == TOKA_STOP;
    pthread_mutex_lock(&S.lock);
    bool too_late = x->number != number || !x->taken;
    int64_t id = x->id;
    pthread_mutex_unlock(&S.lock);
    if (too_late) {
        wrong("request %lld: an event (sample %d, finish %d) after its end", (long long)number, ev->sample, ev->finish);
        S.in_callback = false;
        return 1;
    }
    S.expected = ev->more ? x : NULL;
    bool ended = check_event(x, ev), cancel = x->n_events == x->j.cancel_event, by_return = x->j.by_return || !id;
    if (x->n_events == x->j.follow_event) {
        rng r = stream(S.seed, 6, (uint64_t)number);
        send_request(&r, false);
    }
    if (cancel && !by_return) toka_cancel(S.t, id), x->events_left = x->j.n_prompt + 8 * x->n_live;
    x->over |= cancel && by_return;
    if (ended && x->j.how == SUBMIT) slot_free(x, true);
    S.in_callback = false;
    return cancel && by_return;
}

static void accepted(const slot *x) {
    pthread_mutex_lock(&S.lock);
    S.n_accepted++, S.n_samples += MAX(x->j.r.n, 1);
    pthread_mutex_unlock(&S.lock);
}

static void send_submit(slot *x) {
    int64_t number = x->number, id = 0;
    toka_err e = {0};
    bool at_once = x->j.at_once;
    accepted(x); /* it may be over before toka_submit returns */
    if (toka_submit(S.t, &x->j.r, on_event, (void *)(intptr_t)number, &id, &e)) {
        wrong("request %lld was refused: %s", (long long)number, e.msg);
        pthread_mutex_lock(&S.lock);
        S.n_accepted--;
        pthread_mutex_unlock(&S.lock);
        slot_free(x, false);
        return;
    }
    if (at_once) toka_cancel(S.t, id);
    atomic_store(&S.last_id, id);
    pthread_mutex_lock(&S.lock);
    if (x->number == number) x->id = id;
    pthread_mutex_unlock(&S.lock);
}

static void send_generate(slot *x) {
    toka_err e = {0};
    toka_usage u = {0};
    long long no = (long long)x->number;
    accepted(x);
    int code = toka_generate(S.t, &x->j.r, on_event, (void *)(intptr_t)x->number, &u, &e);
    EXPECT(code == (x->n_cancelled ? TOKA_E_CANCELLED : 0), "request %lld: code %d (%s), %d samples cancelled", no, code, e.msg,
           x->n_cancelled);
    EXPECT(!x->n_live, "request %lld: toka_generate is back, %d samples have not ended", no, x->n_live);
    EXPECT(u.prompt_tokens == x->j.n_prompt && u.output_tokens == x->n_tokens, "request %lld: usage says %lld tokens, %d came",
           no, (long long)u.output_tokens, x->n_tokens);
    slot_free(x, true);
}

static void send_score(slot *x) {
    toka_err e = {0};
    float *lp = need(malloc((size_t)x->j.n_prompt * sizeof *lp));
    accepted(x);
    int code = toka_score(S.t, x->j.prompt, (size_t)x->j.n_prompt, lp, &e);
    EXPECT(!code || code == TOKA_E_CANCELLED, "request %lld: score is %d, %s", (long long)x->number, code, e.msg);
    for (int i = 0; i < x->j.n_prompt && !code; i++) put(&x->o.places, &(token){x->j.prompt[i], lp[i], 0, 0}, sizeof(token));
    x->n_cancelled = code != 0, x->n_live = 0;
    free(lp);
    slot_free(x, !code);
}

static void send_wrong(slot *x) {
    toka_err e = {0};
    int64_t id;
    void *user = (void *)(intptr_t)x->number;
    int code = x->j.how == SUBMIT ? toka_submit(S.t, &x->j.r, on_event, user, &id, &e)
                                  : toka_generate(S.t, &x->j.r, on_event, user, NULL, &e);
    EXPECT(code == TOKA_E_USE && *e.msg, "request %lld is wrong, and the code is %d", (long long)x->number, code);
    pthread_mutex_lock(&S.lock);
    S.n_refused++;
    pthread_mutex_unlock(&S.lock);
    slot_free(x, false);
}

/* Sends one request if a slot is free. may_wait: false in a callback. */
static void send_request(rng *r, bool may_wait) {
    slot *x = slot_take(r);
    if (!x) return;
    make_job(&x->j, x->number, NULL);
    if (!may_wait) x->j.how = SUBMIT;
    slot_begin(x, x->number);
    if (x->j.wrong) send_wrong(x);
    else if (x->j.how == GENERATE) send_generate(x);
    else if (x->j.how == SCORE) send_score(x);
    else send_submit(x);
}

/* ---- Threads ---- */

static void *submitter(void *arg) {
    rng r = stream(S.seed, 7, (uint64_t)(intptr_t)arg);
    while (!S.quit) {
        send_request(&r, true);
        if (S.pause || chance(&r, 30)) usleep((useconds_t)between(&r, 1, 8000));
    }
    return NULL;
}

static void *driver(void *arg) {
    toka_err e = {0};
    (void)arg;
    do {
        if (toka_run(S.t, S.forever, &e)) wrong("toka_run: %s", e.msg);
        usleep(100);
    } while (!S.forever && !S.quit);
    return NULL;
}

static void check_stats(toka_stats s, toka_stats *before) {
    int max_len = S.o.max_num_seqs * S.o.data_parallel_size;
    EXPECT(s.running >= 0 && s.running <= max_len, "%d samples run, at most %d may", s.running, max_len);
    EXPECT(s.waiting >= 0 && s.kv_pages_used >= 0 && s.kv_pages_used <= s.kv_pages, "%d wait, %d of %d pages", s.waiting,
           s.kv_pages_used, s.kv_pages);
    EXPECT(s.steps >= before->steps && s.rows >= before->rows && s.output_tokens >= before->output_tokens &&
               s.requests_done >= before->requests_done && s.preemptions >= before->preemptions &&
               s.prompt_tokens >= before->prompt_tokens,
           "a counter of the statistics went back");
    EXPECT(s.prompt_tokens_shared <= s.prompt_tokens && s.attended_shared <= s.attended, "more is shared than there is");
    *before = s;
}

static void *canceller(void *arg) {
    rng r = stream(S.seed, 8, 0);
    toka_stats before = {0};
    (void)arg;
    while (!S.quit) {
        int64_t last = atomic_load(&S.last_id);
        pthread_mutex_lock(&S.lock);
        int64_t id = S.slots[below(&r, SLOTS)].id; /* may be over */
        pthread_mutex_unlock(&S.lock);
        /* may be an id that no request has yet */
        if (chance(&r, 10)) id = last - below(&r, 60) + 5;
        if (chance(&r, 15)) toka_cancel(S.t, id);
        check_stats(toka_get_stats(S.t), &before);
        usleep((useconds_t)between(&r, 1, 20000));
    }
    return NULL;
}

/* ---- Pauses: no request is active ---- */

static int n_taken(void) {
    pthread_mutex_lock(&S.lock);
    int n = S.n_taken;
    pthread_mutex_unlock(&S.lock);
    return n;
}

static void hang(const char *what) {
    toka_stats s = toka_get_stats(S.t);
    wrong("%s: nothing has happened for %.0f s; %d run, %d wait, %d of %d pages used, %lld of %lld requests done, %lld tokens, "
          "%lld events have come",
          what, S.hang_s, s.running, s.waiting, s.kv_pages_used, s.kv_pages, (long long)s.requests_done, (long long)S.n_accepted,
          (long long)s.output_tokens, (long long)S.n_tokens);
    for (int i = 0; i < SLOTS; i++)
        if (S.slots[i].taken)
            fprintf(stderr, "soak: request %lld: %d of %d samples have not ended\n", (long long)S.slots[i].number,
                    S.slots[i].n_live, S.slots[i].j.r.n);
    fprintf(stderr, "soak: again with: %s\n", S.command);
    _exit(1);
}

static void cancel_all(void) {
    for (int i = 0; i < SLOTS; i++) {
        pthread_mutex_lock(&S.lock);
        int64_t id = S.slots[i].taken ? S.slots[i].id : 0;
        pthread_mutex_unlock(&S.lock);
        if (id) toka_cancel(S.t, id);
    }
}

/* Waits for all active requests and cancels those that take long. Then waits for statistics that
 * show this. */
static void pause_mix(double max_seconds) {
    double began = now(), last = began;
    long long events = -1;
    int64_t steps = -1;
    S.pause = true;
    for (; n_taken(); usleep(2000)) {
        toka_stats s = toka_get_stats(S.t);
        if (S.n_events != events || s.steps != steps) events = S.n_events, steps = s.steps, last = now();
        if (now() - last > S.hang_s) hang("requests do not end");
        if (now() - began > max_seconds) cancel_all(), began = now();
    }
    for (last = now();; usleep(2000)) {
        toka_stats s = toka_get_stats(S.t);
        /* a sample that a callback cancelled may have got one more token in the step whose events
         * were being delivered */
        int64_t unseen = s.output_tokens - S.n_tokens;
        if (!s.running && !s.waiting && !s.kv_pages_used && s.requests_done == S.n_accepted && unseen >= 0 && unseen <= S.n_cancelled)
            break;
        if (now() - last > S.hang_s) hang("at rest");
    }
    EXPECT(!S.expected, "the last event of all said that there is more");
}

typedef struct memory {
    double heap, resident; /* MB, without the records that this program keeps */
} memory;

static memory measure(void) {
    size_t kept = 0;
    long pages = 0, resident = 0;
    for (int i = 0; i < RECORDS; i++) {
        request_result *o = &S.records[i];
        kept += malloc_usable_size(o->prompt.p) + malloc_usable_size(o->places.p);
        for (int k = 0; k < KEEP; k++) kept += malloc_usable_size(o->samples[k].tokens.p) + malloc_usable_size(o->samples[k].text.p);
    }
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%ld %ld", &pages, &resident) != 2) resident = 0;
    if (f) fclose(f);
    struct mallinfo2 m = mallinfo2(); /* all zeros under a sanitizer */
    double own = (double)kept / 1e6, heap = (double)(m.uordblks + m.hblkhd) / 1e6;
    return (memory){heap > 0 ? heap - own : 0, (double)resident * (double)sysconf(_SC_PAGESIZE) / 1e6 - own};
}

/* ---- Running again, alone ---- */

static int on_rerun_event(void *user, const toka_event *ev) { return check_event(user, ev), 0; }

static bool same_bytes(const vec *a, const vec *b, bool beginning, size_t unit, size_t *at) {
    size_t n = MIN(a->n, b->n) / unit;
    for (*at = 0; *at < n; ++*at)
        if (memcmp(a->p + *at * unit, b->p + *at * unit, unit)) return false;
    return a->n == b->n || (beginning && a->n < b->n);
}

/* Whether result a (in the mix) agrees with b (alone). */
static bool same_result(const request_result *a, const request_result *b, int n, bool loud) {
    size_t at;
    long long no = (long long)a->number;
    if (!same_bytes(&a->places, &b->places, !a->ended, sizeof(token), &at)) {
        if (loud) wrong("request %lld: place %zu of the prompt differs when it is run alone", no, at);
        return false;
    }
    for (int i = 0; i < n; i++) {
        const sample_result *x = &a->samples[i], *y = &b->samples[i];
        bool cut = x->finish == TOKA_CANCELLED;
        if (!same_bytes(&x->tokens, &y->tokens, cut, sizeof(token), &at)) {
            token none = {0}, p = at < x->tokens.n / sizeof p ? ((token *)x->tokens.p)[at] : none,
                  q = at < y->tokens.n / sizeof q ? ((token *)y->tokens.p)[at] : none;
            if (loud)
                wrong("request %lld: token %zu of sample %d differs when it is run alone: id %d, logprob %.9g, sampled %.9g, "
                      "best %08x; alone %d, %.9g, %.9g, %08x (%zu and %zu tokens)",
                      no, at, i, p.id, p.logprob, p.sampled_logprob, p.top, q.id, q.logprob, q.sampled_logprob, q.top,
                      x->tokens.n / sizeof p, y->tokens.n / sizeof q);
            return false;
        }
        bool ends = cut || (x->finish == y->finish && x->stop_id == y->stop_id && x->stop_text == y->stop_text);
        if (!ends || !same_bytes(&x->text, &y->text, cut, 1, &at)) {
            if (loud) wrong("request %lld: the text or the end of sample %d differs when it is run alone", no, i);
            return false;
        }
    }
    return true;
}

/* Runs a record's request again. Returns true if the result is the same. */
static bool run_again(toka *t, slot *x, const request_result *was, bool loud) {
    toka_err e = {0};
    make_job(&x->j, was->number, &was->prompt);
    job *j = &x->j;
    j->r.n = MIN(j->r.n, KEEP), j->r.priority = 0, j->how = was->scored ? SCORE : GENERATE;
    slot_begin(x, was->number);
    int code;
    if (was->scored) {
        float *lp = need(malloc((size_t)j->n_prompt * sizeof *lp));
        code = toka_score(t, j->prompt, (size_t)j->n_prompt, lp, &e);
        for (int i = 0; i < j->n_prompt; i++) put(&x->o.places, &(token){j->prompt[i], lp[i], 0, 0}, sizeof(token));
        free(lp);
    } else {
        code = toka_generate(t, &j->r, on_rerun_event, x, NULL, &e);
    }
    if (code) wrong("request %lld alone: %s", (long long)was->number, e.msg);
    bool same = same_result(was, &x->o, was->scored ? 0 : j->r.n, loud);
    request_result_free(&x->o), free(x->samples), x->samples = NULL;
    return same;
}

/* Runs the records again in random order until the time is over. */
static void run_all_again(int *n_same, int *n_rerun) {
    toka_options o = S.o;
    toka_err e = {0};
    toka *t;
    slot x = {.j.prompt = need(calloc((size_t)S.info.max_model_len + 1, sizeof(int32_t)))};
    o.kv_tokens = 0, o.max_num_seqs = 16, o.max_num_batched_tokens = 512, o.n_threads = 2, o.data_parallel_size = 1,
    o.no_prefix_caching = true, o.speculative_config = o.draft_model = NULL; /* without drafts */
    if (toka_open(&t, &o, &e)) die(&e);
    S.t = t; /* stop strings are made with it */
    make_words();
    rng r = stream(S.seed, 9, 0);
    int n = (int)MIN(S.n_ended, RECORDS);
    for (double end = now() + S.seconds * (1 - MIX); n && now() < end;) {
        int k = below(&r, n--);
        *n_same += run_again(t, &x, &S.records[k], S.exact), ++*n_rerun;
        request_result_free(&S.records[k]);
        S.records[k] = S.records[n], S.records[n] = (request_result){0};
    }
    while (n) request_result_free(&S.records[--n]);
    free(x.j.prompt);
    toka_close(t), drop_words();
}

/* ---- The run ---- */

/* Chooses from the seed what no flag sets. */
static void choose_settings(bool given_kv) {
    rng r = stream(S.seed, 10, 0);
    static const int lengths[] = {96, 160, 250, 333}, seqs[] = {5, 17, 30, 64, 200};
    toka_options *o = &S.o;
    S.exact = !strcmp(o->device, "cpu");
    int length = lengths[below(&r, COUNT(lengths))], n_seqs = seqs[below(&r, COUNT(seqs))],
        extra = chance(&r, 50) ? between(&r, 0, 30) : 300;
    double times = chance(&r, 50) ? 1 : real(&r, 1, 4);
    if (!o->max_model_len) o->max_model_len = length;
    if (!o->max_num_seqs) o->max_num_seqs = n_seqs;
    if (!o->max_num_batched_tokens) o->max_num_batched_tokens = o->max_num_seqs + extra;
    if (!given_kv) o->kv_tokens = (int64_t)(o->max_model_len * times);
    if (!o->n_threads) o->n_threads = between(&r, 1, 2);
    if (!o->data_parallel_size) o->data_parallel_size = S.exact && chance(&r, 35) ? between(&r, 2, 3) : 1;
    o->no_prefix_caching |= chance(&r, 12);
    if (S.exact && chance(&r, 50)) { /* never a GPU */
        o->speculative_config = chance(&r, 50) ? "{\"method\":\"ngram\",\"prompt_lookup_min\":1}" : "{\"method\":\"suffix\"}";
        if (chance(&r, 40)) o->speculative_config = NULL, o->draft_model = o->model ? o->model : "test/model";
        if (chance(&r, 70)) setenv("TOKA_DEBUG_DRAFTS", "1", 1);
    }
    S.forever = chance(&r, 60), S.two_drivers = chance(&r, 40);
    S.hang_s = 60;
}

static void parse(int argc, char **argv) {
    bool given_kv = false;
    S.o = toka_options_default(), S.o.device = "cpu", S.o.model = "test/model", S.o.data_parallel_size = 0, S.seconds = 15, S.seed = 1;
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *f = argv[i], *v = argv[i + 1];
        if (!strcmp(f, "--model")) S.o.model = v;
        else if (!strcmp(f, "--device")) S.o.device = v;
        else if (!strcmp(f, "--seconds")) S.seconds = atof(v);
        else if (!strcmp(f, "--seed")) S.seed = strtoull(v, NULL, 10);
        else if (!strcmp(f, "--kv-tokens")) S.o.kv_tokens = atoll(v), given_kv = true;
        else if (!strcmp(f, "--max-model-len")) S.o.max_model_len = atoi(v);
        else if (!strcmp(f, "--max-num-seqs")) S.o.max_num_seqs = atoi(v);
        else if (!strcmp(f, "--max-num-batched-tokens")) S.o.max_num_batched_tokens = atoi(v);
        else if (!strcmp(f, "--data-parallel-size")) S.o.data_parallel_size = atoi(v);
        else if (!strcmp(f, "--threads")) S.o.n_threads = atoi(v);
        else argc = 0; /* prints the usage below */
    }
    if (argc % 2 == 0) {
        fputs("soak [--model DIR] [--device cpu|cuda] [--seconds S] [--seed N] [--kv-tokens N] [--max-model-len N] "
              "[--max-num-seqs N]\n"
              "     [--max-num-batched-tokens N] [--data-parallel-size N] [--threads N]\n",
              stderr);
        exit(2);
    }
    choose_settings(given_kv);
    snprintf(S.command, sizeof S.command,
             "%s --model %s --device %s --seconds %g --seed %llu --kv-tokens %lld --max-model-len %d --max-num-seqs %d "
             "--max-num-batched-tokens %d "
             "--data-parallel-size %d --threads %d",
             argv[0], S.o.model, S.o.device, S.seconds, (unsigned long long)S.seed, (long long)S.o.kv_tokens, S.o.max_model_len,
             S.o.max_num_seqs, S.o.max_num_batched_tokens, S.o.data_parallel_size, S.o.n_threads);
}

static void start(void) {
    toka_err e = {0};
    char *text = NULL;
    size_t n = 0;
    if (toka_open(&S.t, &S.o, &e)) die(&e);
    S.info = toka_get_info(S.t);
    S.has_tok = !toka_decode(S.t, NULL, 0, 0, &text, &n, &e);
    free(text);
    make_words();
    make_docs();
    pthread_mutex_init(&S.lock, NULL);
    for (int i = 0; i < SLOTS; i++) {
        S.slots[i].number = i - SLOTS; /* the first request in slot i has number i */
        S.slots[i].j.prompt = need(calloc((size_t)S.info.max_model_len + 1, sizeof(int32_t)));
    }
}

/* Closes the engine while requests are active: each sample must still end once. */
static void close_while_active(pthread_t *drivers, int n_drivers) {
    rng r = stream(S.seed, 11, 0);
    S.pause = false;
    for (int i = 0; i < 30; i++) send_request(&r, false);
    S.pause = true;
    usleep((useconds_t)between(&r, 0, 100000));
    toka_stop(S.t);
    if (S.forever)
        for (int i = 0; i < n_drivers; i++) pthread_join(drivers[i], NULL);
    toka_close(S.t), drop_words();
    for (int i = 0; i < SLOTS; i++)
        EXPECT(!S.slots[i].taken, "request %lld: %d samples have not ended after toka_close", (long long)S.slots[i].number,
               S.slots[i].n_live);
    S.expected = NULL;
}

/* Pauses now and then. Compares memory at the first pause with the last. */
static void soak(memory *first, memory *last) {
    static const double pause_times[] = {0.3, 0.5, 0.7, 0.85, 1};
    double began = now();
    for (int i = 0; i < COUNT(pause_times); i++) {
        S.pause = false;
        double left = began + pause_times[i] * MIX * S.seconds - now();
        if (left > 0) usleep((useconds_t)(left * 1e6));
        pause_mix(i % 2 ? 0.1 : 1); /* what takes longer is cancelled */
        *last = measure();
        if (!i) *first = *last;
    }
    if (!last->heap) return; /* a sanitizer's own memory is not the engine's */
    EXPECT(last->heap - first->heap < 1, "the heap grew from %.2f to %.2f MB", first->heap, last->heap);
    EXPECT(last->resident - first->resident < 10 + 0.1 * first->resident, "memory grew from %.1f to %.1f MB", first->resident,
           last->resident);
}

int main(int argc, char **argv) {
    parse(argc, argv);
    start();
    pthread_t thread[SUBMITTERS + 1], drivers[2];
    int n_drivers = 1 + S.two_drivers, n_same = 0, n_rerun = 0;
    memory first = {0}, last = {0};
    rng r = stream(S.seed, 12, 0);
    for (int i = 0; i < EXTREMES; i++) send_request(&r, false);
    for (int i = 0; i < n_drivers; i++) pthread_create(&drivers[i], NULL, driver, NULL);
    for (int i = 0; i < SUBMITTERS; i++) pthread_create(&thread[i], NULL, submitter, (void *)(intptr_t)i);
    pthread_create(&thread[SUBMITTERS], NULL, canceller, NULL);
    soak(&first, &last);
    S.quit = true;
    for (int i = 0; i <= SUBMITTERS; i++) pthread_join(thread[i], NULL);
    if (!S.forever) /* they end by themselves */
        for (int i = 0; i < n_drivers; i++) pthread_join(drivers[i], NULL);
    toka_stats s = toka_get_stats(S.t);
    close_while_active(drivers, n_drivers);
    run_all_again(&n_same, &n_rerun);
    for (int i = 0; i < SLOTS; i++) free(S.slots[i].j.prompt);
    for (int i = 0; i < DOCS; i++) drop(&S.docs[i]);
    for (int i = 0; i < N_CONTINUED; i++) drop(&S.continued_prompts[i]);
    printf("soak: seed %llu: %lld requests, %lld samples, %lld tokens, %lld steps, %lld preemptions, %lld cancelled, %lld "
           "stopped, %lld refused; "
           "%lld of %lld drafts right; %d replicas; %d of %d the same alone; heap %+.2f MB, resident %.1f to %.1f MB; %d wrong\n",
           (unsigned long long)S.seed, (long long)S.n_accepted, (long long)S.n_samples, (long long)S.n_tokens, (long long)s.steps,
           (long long)s.preemptions, (long long)S.n_cancelled, (long long)S.n_stopped, (long long)S.n_refused,
           (long long)s.draft_tokens_accepted, (long long)s.draft_tokens, S.o.data_parallel_size, n_same, n_rerun, last.heap - first.heap, first.resident, last.resident, S.n_wrong);
    if (S.n_wrong) fprintf(stderr, "soak: again with: %s\n", S.command);
    return S.n_wrong != 0;
}
