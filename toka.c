/* toka.c - a high-throughput LLM inference engine in one C file.  SPDX-License-Identifier: Apache-2.0
 *
 * WHAT IT IS. toka loads a model folder in Hugging Face layout and turns text into text: tokenizer, chat template, weights,
 * transformer, paged KV, scheduler, sampling, batch runner, server, command line, with nothing beneath it but libc. Three uses
 * decide every question of design: a quick run on any Linux machine; millions of completions as fast as the hardware
 * allows; copying these files into another project, to vendor, teach or review. So it is one file that reads from top to
 * bottom, each chapter using only earlier ones.
 *
 * WHAT IT IS NOT. It does not train, quantize, convert or download. It runs dense decoder-only transformers of the Llama family
 * (Llama, Mistral, Qwen 2 and 3); a model it would compute differently from its authors is refused by name.
 *
 * HOW DATA FLOWS, with the chapter that does it:
 *
 *     model folder ----- mf_open (10) ----> shape, weights (mapped, not copied), tokenizer.json, template, end ids
 *     messages --------- tmpl_render (9) -> prompt text
 *     text ------------- tok_encode (6) --> ids
 *     ids -------------- eng_submit (18) -> inbox -> sched_submit (13): a request of n samples in the queue
 *         +-> sched_plan (13) ----------> which tokens of which sequences go into the next step; pages from kv_open (11),
 *         |                               lengths guessed by pred (12)
 *         |   batch_build (14) ---------> toka_step: T rows as integers, shared prefixes as spans of their own
 *         |   model_step (17) ----------> embed, then L times {norm_qkv_rope_kv, attention, out_residual,
 *         |       over toka_backend        norm_mlp_residual}, then norm_logits_sample: the table of toka.h,
 *         |       (16 is the CPU's)        which calls samp_row (15) on each row of logits
 *         +-- eng_commit (18) <---------- toka_pick: the id and its log-probability; sched_commit (13) files it
 *     id --------------- tok_stream_put (6), stop_put (15) --> text that is certain --> toka_event --> the caller,
 *                                         who may be a person (29), a file of results (22) or another program (19);
 *                                         answers over HTTP are made from the ids by workers: api_feed (21, 25, 26)
 *
 * A step is planned as integers, run, and committed. Plans know no floats and no text; ops know no requests. That is what
 * lets the planning be tested without a model and the ops without an engine, and lets another device run the same plans.
 *
 * THE LIFE OF A REQUEST. States are those of its samples; each arrow names the function that performs it.
 *
 *     eng_submit --(eng_check fails)--> refused: an error, nothing was touched
 *         |  eng_take, sched_submit
 *         v
 *       queued ---sched_admit---> prefill ---sched_feed_prefill---> decode ---eng_deliver, sched_commit---> stop, length
 *                                  ^   |                             |
 *                                  |   +------sched_preempt----------+      pages run out: the newest waits
 *                                  +---------- parked <--------------+      with its tokens, and goes on later
 *
 *     cancelled  from any state: toka_cancel, a callback that returned not 0, toka_close (eng_end_all)
 *     failed     from any state: the device failed (eng_break)
 *
 * WHO OWNS WHAT.
 *   model   mf_model, tok, tmpl: immutable after toka_open, read by any thread
 *   engine  scheduler, pages, plans: sized at open; touched only by the thread that drives (eng_drive). Other threads reach it
 *           through an inbox under one lock
 *   device  activations, KV, scratch: taken at open by the backend; its threads run ops and return before the op does
 *   server  one thread has all sockets, workers read bodies and make text, one drives the engine; calls go round by lists (25)
 *   event   pointers live during the callback; what is handed out by toka_encode and friends is malloc'ed for the caller
 * Names tell lifetimes: _open/_close for what holds system things, _init/_free for caller's storage, _new/_del for the heap.
 *
 * ERRORS. A function that can fail returns 0 or a negative toka_code and fills the caller's toka_err with one sentence: what,
 * where, found, expected. Four classes, never mixed: a bug asserts; bad start-up input travels up to main, the only place that
 * prints and exits; a bad request fails that request; a device fault is latched by the device and fails all requests. What
 * comes from a file or a network is checked where it is read and is an error, never an assert. To rehearse the last class, the
 * environment can break a device: TOKA_DEBUG_FAULT=N fails its Nth step, TOKA_DEBUG_STALL=N (CPU) never returns from it.
 *
 * WHAT ALWAYS HOLDS.
 *   1. A row's result depends on its own tokens only: not on batch mates, chunks of prefill, threads, preemption or the cutting
 *      of attention into spans. Every sum over the model's width or over positions has one fixed order. (16; tests compare bytes.
 *      A GPU's sums depend on the tile shapes that the number of rows selects: there it holds to rounding)
 *   2. The random number of a token is a function of (seed, sample, position). With 1, a run can be repeated exactly. (15)
 *   3. No text leaves before it is certain: no half character, no beginning of a stop string. (6, 15)
 *   4. Weights are read where the file is mapped, in the file's type; all arithmetic is float32. (10, 16)
 *
 * LETTERS, equal in C, CUDA and README. T tokens of a step, S sequences, L layers, H query heads, K kv heads, D head size,
 * E model width, F mlp width, V vocabulary, B tokens per page. Prefixes name chapters: st_ and mf_ are chapter 10.
 *
 * CONTENTS (build.sh checks it against the banners; to read one chapter: sed -n '/MARK: 4\./,/MARK: 5\./p' toka.c)
 *
 *   1. Types [pure]
 *   2. Base: memory, slices, buffers, errors [pure]
 *   3. OS shell [os]
 *   4. JSON [pure]
 *   5. Unicode [pure]
 *   6. Tokenizer [pure]
 *   7. Chat template: parser [pure]
 *   8. Chat template: values [pure]
 *   9. Chat template: evaluation [pure]
 *  10. Model files [os]
 *  11. KV pages and prefix tree [pure]
 *  12. Length predictor [pure]
 *  13. Scheduler [pure]
 *  14. Batch building and shared prefixes [pure]
 *  15. Sampling and stops [pure]
 *  16. CPU backend [cpu]
 *  17. Model: the layer loop [os]
 *  18. Engine [os]
 *  19. Public API [os]
 *  20. HTTP [pure]
 *  21. OpenAI API [pure]
 *  22. Batch runner [os]
 *  23. Files and batches [os]
 *  24. Status page [pure]
 *  25. Server: requests and metrics [os]
 *  26. Server: connections [os]
 *  27. Bench and plan [os]
 *  28. Bench serve [os]
 *  29. Command line [os]
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* mmap flags, sched_getaffinity, memmem */
#endif
#define TOKA_INTERNAL
#include "toka.h"

#include <assert.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <locale.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* ===========================================================================
 * MARK: 1. Types [pure]
 * The cast of more than one chapter. What only one chapter needs stands there.
 * =========================================================================== */

typedef struct str { /* a borrowed slice of bytes; not NUL-terminated */
    const char *p;
    size_t n;
} str;

typedef struct buf { /* growable bytes, owned; p is NUL-terminated once anything was put */
    char *p;
    size_t n, cap;
} buf;

typedef struct ids { /* growable token ids, owned */
    int32_t *p;
    size_t n, cap;
} ids;

typedef struct arena { /* many small allocations freed in one call; blocks are chained, newest first */
    struct arena_block *blocks;
    size_t used; /* bytes used of the newest block */
} arena;

/* A JSON value: one node of 16 bytes in a flat array, in document order. A container's children follow it directly;
 * an object's are key, value, key, value ... Strings without escapes borrow from the text, which must outlive the nodes. */
typedef struct json {
    uint8_t type;     /* enum json_type */
    uint8_t exact;    /* JSON_NUMBER: written as an integer that fits int64; .i holds it */
    uint32_t n;       /* string: bytes; array: elements; object: members */
    union {
        const char *s; /* string */
        double f;      /* number, exact 0 */
        int64_t i;     /* number, exact 1 */
        size_t skip;   /* container: nodes of the whole subtree with itself */
    };
} json;

enum json_type { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

/* ===========================================================================
 * MARK: 2. Base: memory, slices, buffers, errors [pure]
 * Small allocations abort when the system has no memory left (on Linux it never says so for small ones). Sizes that a file, a
 * request or a flag chooses go through checked calls where they are made, and become errors.
 * =========================================================================== */

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define UNUSED __attribute__((unused)) /* library builds do not call everything */

static void *mem_check(void *p) {
    if (!p) {
        fputs("toka: out of memory\n", stderr);
        abort();
    }
    return p;
}
static void *mem_alloc(size_t n) { return mem_check(malloc(n ? n : 1)); }
static void *mem_zalloc(size_t n) { return mem_check(calloc(n ? n : 1, 1)); }
static void *mem_realloc(void *p, size_t n) { return mem_check(realloc(p, n ? n : 1)); }
/* n * size bytes of zeros, for a size that a flag chose; NULL: so much memory there is not. */
static void *mem_try(size_t n, size_t size) { return calloc(MAX(n, (size_t)1), size); }

/* Fills *e and returns its code, so that `return fail(e, ...)` is the only error line a function needs. */
__attribute__((format(printf, 3, 4))) static int fail(toka_err *e, int code, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    e->code = code;
    vsnprintf(e->msg, sizeof e->msg, fmt, ap);
    va_end(ap);
    for (char *c = e->msg; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7F) *c = '?'; /* a name out of a hostile file must not steer a terminal */
    return code;
}

/* ---- Slices ---- */

#define STR(literal) ((str){"" literal, sizeof(literal) - 1})
#define STRF(s) (int)MIN((s).n, (size_t)200), (s).p /* for "%.*s"; long ones are cut */

static str str_c(const char *z) { return (str){z, strlen(z)}; }
static str str_sub(str s, size_t from, size_t to) { return (str){s.p + from, to - from}; }
static bool str_eq(str a, str b) { return a.n == b.n && (!a.n || memcmp(a.p, b.p, a.n) == 0); }
static bool str_is(str a, const char *z) { return str_eq(a, str_c(z)); }
static bool str_starts(str s, str head) { return s.n >= head.n && str_eq((str){s.p, head.n}, head); }
static bool str_ends(str s, str tail) { return s.n >= tail.n && str_eq((str){s.p + s.n - tail.n, tail.n}, tail); }

/* Index of the first `needle` in s at or after `from`, or -1. An empty needle is found at once. */
static ptrdiff_t str_find(str s, str needle, size_t from) {
    if (from > s.n || needle.n > s.n - from) return -1;
    if (!needle.n) return (ptrdiff_t)from;
    const char *at = memmem(s.p + from, s.n - from, needle.p, needle.n);
    return at ? at - s.p : -1;
}

/* 64-bit hash of bytes, for tables in memory only (not stable across versions, not against attackers). */
static uint64_t hash_bytes(const void *p, size_t n) {
    const unsigned char *s = p;
    uint64_t h = 0x9E3779B97F4A7C15u ^ n;
    for (; n >= 8; s += 8, n -= 8) {
        uint64_t w;
        memcpy(&w, s, 8);
        h = (h ^ w) * 0xFF51AFD7ED558CCDu;
        h ^= h >> 32;
    }
    for (; n; s++, n--) h = (h ^ *s) * 0x100000001B3u;
    h ^= h >> 29;
    h *= 0xC4CEB9FE1A85EC53u;
    return h ^ h >> 32;
}

/* ---- Buffers ---- */

static void buf_reserve(buf *b, size_t more) {
    if (b->cap - b->n > more) return; /* one byte is kept for the NUL */
    size_t cap = b->cap + b->cap / 2;
    if (cap < b->n + more + 1) cap = b->n + more + 1;
    if (cap < 64) cap = 64;
    b->p = mem_realloc(b->p, cap);
    b->cap = cap;
}
static void buf_put(buf *b, const void *p, size_t n) {
    buf_reserve(b, n);
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = 0;
}
static void buf_str(buf *b, str s) { buf_put(b, s.p, s.n); }
static void buf_c(buf *b, const char *z) { buf_put(b, z, strlen(z)); }
static void buf_char(buf *b, char c) { buf_put(b, &c, 1); }
static str buf_view(const buf *b) { return (str){b->p ? b->p : "", b->n}; }
static void buf_clear(buf *b) { b->n = 0; }
static void buf_free(buf *b) {
    free(b->p);
    *b = (buf){0};
}
__attribute__((format(printf, 2, 3))) static void buf_printf(buf *b, const char *fmt, ...) {
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    buf_reserve(b, (size_t)n + 1);
    vsnprintf(b->p + b->n, (size_t)n + 1, fmt, again);
    va_end(again);
    b->n += (size_t)n;
}

static void ids_reserve(ids *v, size_t more) {
    if (v->cap - v->n >= more) return;
    v->cap = MAX(v->cap + v->cap / 2, v->n + more);
    v->p = mem_realloc(v->p, v->cap * sizeof *v->p);
}
static void ids_push(ids *v, int32_t id) {
    if (v->n == v->cap) ids_reserve(v, 64);
    v->p[v->n++] = id;
}
static void ids_free(ids *v) {
    free(v->p);
    *v = (ids){0};
}

/* ---- Arena ---- */

struct arena_block {
    struct arena_block *older;
    size_t cap;
    _Alignas(16) char bytes[];
};

static void *arena_alloc(arena *a, size_t n) {
    size_t at = (a->used + 15) & ~(size_t)15;
    if (!a->blocks || n > a->blocks->cap || at > a->blocks->cap - n) {
        size_t cap = a->blocks ? MIN(a->blocks->cap * 2, (size_t)1 << 20) : 4096;
        if (cap < n) cap = n;
        struct arena_block *b = mem_alloc(sizeof *b + cap);
        *b = (struct arena_block){.older = a->blocks, .cap = cap};
        a->blocks = b;
        at = 0;
    }
    a->used = at + n;
    return a->blocks->bytes + at;
}
static void *arena_zalloc(arena *a, size_t n) { return memset(arena_alloc(a, n), 0, n); }
static char *arena_cstr(arena *a, str s) { /* copy with a NUL behind it */
    char *p = arena_alloc(a, s.n + 1);
    if (s.n) memcpy(p, s.p, s.n);
    p[s.n] = 0;
    return p;
}
static str arena_str(arena *a, str s) { return (str){arena_cstr(a, s), s.n}; }
static void arena_free(arena *a) {
    for (struct arena_block *b = a->blocks, *older; b; b = older) {
        older = b->older;
        free(b);
    }
    *a = (arena){0};
}

/* ===========================================================================
 * MARK: 3. OS shell [os]
 * Every system call that is not a socket: files, clock, cores. Thin, so that the chapters above stay pure.
 * =========================================================================== */

static double os_now(void) { /* seconds on a clock that never steps back */
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int os_n_cores(void) { /* cores this process may use */
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return MAX(1, CPU_COUNT(&set));
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

static int64_t os_ram_bytes(void) { /* memory that this process may take: the machine's, its container's, its limit's */
    int64_t bytes = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGE_SIZE);
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) bytes = MIN(bytes, (int64_t)limit.rlim_cur);
    FILE *f = fopen("/sys/fs/cgroup/memory.max", "re");
    long long max;
    if (f && fscanf(f, "%lld", &max) == 1 && max > 0) bytes = MIN(bytes, (int64_t)max); /* "max": no limit */
    if (f) fclose(f);
    return bytes;
}

/* Maps a whole regular file read-only. An empty file gives {"",0}. Undo with os_unmap. A path that leads nowhere is
 * TOKA_E_INPUT: it came from a user or a file. TOKA_E_IO is left to what the system itself could not do. */
static int os_map(const char *path, str *out, toka_err *e) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO in a file's place must not hang */
    struct stat st;
    if (fd < 0) {
        bool system = errno == EIO || errno == EMFILE || errno == ENFILE || errno == ENOMEM;
        return fail(e, system ? TOKA_E_IO : TOKA_E_INPUT, "%s: %s", path, strerror(errno));
    }
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return fail(e, TOKA_E_INPUT, "%s: not a regular file", path);
    }
    *out = STR("");
    void *p = st.st_size ? mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
    int err = errno;
    close(fd);
    if (p == MAP_FAILED) return fail(e, TOKA_E_IO, "%s: cannot map %lld bytes: %s", path, (long long)st.st_size, strerror(err));
    if (p) *out = (str){p, (size_t)st.st_size};
    return 0;
}
static void os_unmap(str map) {
    if (map.n) munmap((void *)map.p, map.n);
}

static bool os_is_dir(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}
static bool os_is_file(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

/* Appends all of a file descriptor (a pipe, a terminal, a file) to b; at most `limit` bytes. */
static int os_read_all(int fd, const char *name, size_t limit, buf *b, toka_err *e) {
    for (;;) {
        buf_reserve(b, 65536);
        ssize_t n = read(fd, b->p + b->n, 65536);
        if (n < 0 && errno == EINTR) return fail(e, TOKA_E_CANCELLED, "%s: interrupted", name);
        if (n < 0) return fail(e, errno == EISDIR ? TOKA_E_INPUT : TOKA_E_IO, "%s: %s", name, strerror(errno));
        b->p[b->n += (size_t)n] = 0;
        if (n == 0) return 0;
        if (b->n > limit) return fail(e, TOKA_E_INPUT, "%s: more than %zu bytes", name, limit);
    }
}

/* ===========================================================================
 * MARK: 4. JSON [pure]
 * A strict RFC 8259 reader into flat nodes, and a writer. Self-contained: with chapter 2 it can be lifted out.
 *
 * Reader: json_parse(arena, text, limits, e) returns the root or NULL; e->msg says what and at which byte. Depth and size
 * are limits of the caller. Text must be UTF-8; an escaped lone surrogate (\ud83d alone) is legal JSON and becomes U+FFFD.
 * Numbers keep whether they were written as integers; one beyond the range of a double is an error, so that all are finite.
 * Of equal keys the last wins, as in Python.
 * Walking: json_get, json_at, JSON_EACH, JSON_MEMBERS; a missing value is NULL, and every accessor takes NULL.
 * Writer: json_put_* append one value to a buf and place the comma themselves.
 * =========================================================================== */

typedef struct json_limits {
    int depth;        /* containers in containers at most */
    size_t max_bytes; /* longest text */
} json_limits;

static const json_limits json_trusted = {512, (size_t)1 << 31}; /* for a model's own files */

typedef struct json_reader {
    const char *p, *start, *end; /* next byte, first byte, one past the last */
    arena *a;                    /* unescaped strings, and the nodes in the end */
    json *nodes;                 /* growing */
    size_t n, cap;
    size_t open; /* 1 + index of the innermost open container, 0: none. Its .skip holds the next outer `open` meanwhile */
    int depth;
    json_limits limits;
    toka_err *e;
} json_reader;

static bool json_fail(json_reader *r, const char *what) {
    fail(r->e, TOKA_E_INPUT, "JSON: %s at byte %zu", what, (size_t)(r->p - r->start));
    return false;
}

static json *json_node(json_reader *r, int type) {
    if (r->n == r->cap) {
        r->cap = MAX(r->cap * 2, (size_t)64);
        r->nodes = mem_realloc(r->nodes, r->cap * sizeof *r->nodes);
    }
    json *v = &r->nodes[r->n++];
    *v = (json){.type = (uint8_t)type};
    return v;
}

static void json_space(json_reader *r) {
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\n' || *r->p == '\r' || *r->p == '\t')) r->p++;
}

/* Bytes of the UTF-8 sequence at p (1 to 4), 0 if it is not well formed (Unicode table 3-7). */
static int utf8_len(const char *p, const char *end) {
    unsigned char a = (unsigned char)p[0], b = end - p > 1 ? (unsigned char)p[1] : 0;
    if (a < 0x80) return 1;
    int n = a >= 0xC2 && a <= 0xDF ? 2 : (a & 0xF0) == 0xE0 ? 3 : a >= 0xF0 && a <= 0xF4 ? 4 : 0;
    if (!n || end - p < n || (b & 0xC0) != 0x80) return 0;
    if ((a == 0xE0 && b < 0xA0) || (a == 0xED && b > 0x9F) || (a == 0xF0 && b < 0x90) || (a == 0xF4 && b > 0x8F)) return 0;
    for (int i = 2; i < n; i++)
        if (((unsigned char)p[i] & 0xC0) != 0x80) return 0;
    return n;
}

/* Writes code point c as UTF-8 to p (room for 4); returns its bytes. */
static int utf8_put(char *p, uint32_t c) {
    if (c < 0x80) return p[0] = (char)c, 1;
    if (c < 0x800) return p[0] = (char)(0xC0 | c >> 6), p[1] = (char)(0x80 | (c & 63)), 2;
    if (c < 0x10000)
        return p[0] = (char)(0xE0 | c >> 12), p[1] = (char)(0x80 | (c >> 6 & 63)), p[2] = (char)(0x80 | (c & 63)), 3;
    p[0] = (char)(0xF0 | c >> 18), p[1] = (char)(0x80 | (c >> 12 & 63));
    return p[2] = (char)(0x80 | (c >> 6 & 63)), p[3] = (char)(0x80 | (c & 63)), 4;
}

static int json_hex4(json_reader *r) { /* four hex digits at p, -1 if not */
    int v = 0;
    if (r->end - r->p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int c = r->p[i], d = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (d < 0) return -1;
        v = v * 16 + d;
    }
    r->p += 4;
    return v;
}

/* After "\u": one code point, a surrogate pair joined, a lone surrogate replaced. False if the digits are wrong. */
static bool json_unicode_escape(json_reader *r, uint32_t *c) {
    int hi = json_hex4(r);
    if (hi < 0) return json_fail(r, "\\u needs four hex digits");
    *c = (uint32_t)hi;
    if (hi < 0xD800 || hi > 0xDFFF) return true;
    *c = 0xFFFD;
    if (hi > 0xDBFF || r->end - r->p < 6 || r->p[0] != '\\' || r->p[1] != 'u') return true;
    const char *back = r->p;
    r->p += 2;
    int lo = json_hex4(r);
    if (lo < 0) return json_fail(r, "\\u needs four hex digits");
    if (lo >= 0xDC00 && lo <= 0xDFFF) *c = 0x10000 + ((uint32_t)(hi - 0xD800) << 10) + (uint32_t)(lo - 0xDC00);
    else r->p = back;
    return true;
}

/* The rest of a string from its first escape on: `head` is what came before. p stands on the backslash. */
static bool json_escaped(json_reader *r, str head, json *v) {
    const char *close = r->p; /* the unescaped text is never longer than the escaped one: measure, then write */
    while (close < r->end && *close != '"') close += *close == '\\' ? 2 : 1;
    if (close >= r->end) return r->p = r->end, json_fail(r, "string without an end");
    char *out = arena_alloc(r->a, head.n + (size_t)(close - r->p) + 1), *w = out + head.n;
    memcpy(out, head.p, head.n);
    for (;;) {
        unsigned char c = (unsigned char)*r->p;
        if (c == '"') break;
        if (c >= 0x20 && c < 0x80 && c != '\\') {
            *w++ = *r->p++;
            continue;
        }
        if (c < 0x20) return json_fail(r, "control character in a string");
        if (c != '\\') {
            int n = utf8_len(r->p, r->end);
            if (!n) return json_fail(r, "invalid UTF-8");
            while (n--) *w++ = *r->p++;
            continue;
        }
        static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
        const char *k = r->p[1] ? strchr(from, r->p[1]) : NULL;
        uint32_t u;
        if (k) {
            *w++ = to[k - from];
            r->p += 2;
        } else if (r->p[1] == 'u') {
            r->p += 2;
            if (!json_unicode_escape(r, &u)) return false;
            w += utf8_put(w, u);
        } else {
            return json_fail(r, "unknown escape");
        }
    }
    *v = (json){.type = JSON_STRING, .n = (uint32_t)(w - out), .s = out};
    r->p++;
    return true;
}

static bool json_string(json_reader *r) { /* p stands behind the opening quote */
    json *v = json_node(r, JSON_STRING);
    const char *s = r->p;
    for (;;) {
        while (r->p < r->end && (unsigned char)*r->p >= 0x20 && (unsigned char)*r->p < 0x80 && *r->p != '"' &&
               *r->p != '\\')
            r->p++;
        if (r->p == r->end) return json_fail(r, "string without an end");
        if (*r->p == '"') break;
        if (*r->p == '\\') return json_escaped(r, (str){s, (size_t)(r->p - s)}, v);
        int n = (unsigned char)*r->p < 0x20 ? -1 : utf8_len(r->p, r->end);
        if (n <= 0) return json_fail(r, n < 0 ? "control character in a string" : "invalid UTF-8");
        r->p += n;
    }
    v->s = s;
    v->n = (uint32_t)(r->p++ - s);
    return true;
}

/* Decimal text (already checked) to double, whatever the host program's locale; its point may be several bytes. */
static double json_strtod(str s) {
    const char *point = localeconv()->decimal_point;
    size_t n_point = strlen(point), whole = 0;
    char tmp[64], *z = s.n + n_point < sizeof tmp ? tmp : mem_alloc(s.n + n_point + 1);
    while (whole < s.n && s.p[whole] != '.') whole++;
    memcpy(z, s.p, whole);
    if (whole < s.n) {
        memcpy(z + whole, point, n_point);
        memcpy(z + whole + n_point, s.p + whole + 1, s.n - whole - 1);
        z[s.n + n_point - 1] = 0;
    } else {
        z[whole] = 0;
    }
    double f = strtod(z, NULL);
    if (z != tmp) free(z);
    return f;
}

static bool json_number(json_reader *r) {
    const char *s = r->p;
    bool exact = true, neg = *r->p == '-';
    uint64_t u = 0;
    r->p += neg;
    if (r->p == r->end || !isdigit((unsigned char)*r->p)) return json_fail(r, "digit expected");
    if (*r->p == '0' && r->p + 1 < r->end && isdigit((unsigned char)r->p[1])) return json_fail(r, "leading zero");
    for (; r->p < r->end && isdigit((unsigned char)*r->p); r->p++) {
        unsigned d = (unsigned)(*r->p - '0');
        if (u > ((uint64_t)INT64_MAX + neg - d) / 10) exact = false;
        else u = u * 10 + d;
    }
    if (r->p < r->end && *r->p == '.') {
        exact = false;
        if (++r->p == r->end || !isdigit((unsigned char)*r->p)) return json_fail(r, "digit expected after the point");
        while (r->p < r->end && isdigit((unsigned char)*r->p)) r->p++;
    }
    if (r->p < r->end && (*r->p | 32) == 'e') {
        exact = false;
        if (++r->p < r->end && (*r->p == '+' || *r->p == '-')) r->p++;
        if (r->p == r->end || !isdigit((unsigned char)*r->p)) return json_fail(r, "digit expected in the exponent");
        while (r->p < r->end && isdigit((unsigned char)*r->p)) r->p++;
    }
    json *v = json_node(r, JSON_NUMBER);
    v->exact = exact;
    if (exact) v->i = (int64_t)(neg ? 0 - u : u);
    else v->f = json_strtod((str){s, (size_t)(r->p - s)});
    if (!exact && !isfinite(v->f)) return r->p = s, json_fail(r, "number out of range");
    return true;
}

static bool json_literal(json_reader *r, str word, int type) {
    if (!str_starts((str){r->p, (size_t)(r->end - r->p)}, word)) return json_fail(r, "value expected");
    r->p += word.n;
    json_node(r, type);
    return true;
}

static bool json_open(json_reader *r, int type) {
    if (++r->depth > r->limits.depth) return json_fail(r, "nested too deep");
    json *v = json_node(r, type);
    v->skip = r->open;
    r->open = r->n;
    r->p++;
    return true;
}

static void json_close(json_reader *r) {
    json *v = &r->nodes[r->open - 1];
    size_t self = r->open - 1;
    r->open = v->skip;
    v->skip = r->n - self;
    r->depth--;
    r->p++;
}

/* One value, or the opening of a container. */
static bool json_value(json_reader *r) {
    switch (r->p < r->end ? *r->p : 0) {
    case '{': return json_open(r, JSON_OBJECT);
    case '[': return json_open(r, JSON_ARRAY);
    case '"': return r->p++, json_string(r);
    case 't': return json_literal(r, STR("true"), JSON_TRUE);
    case 'f': return json_literal(r, STR("false"), JSON_FALSE);
    case 'n': return json_literal(r, STR("null"), JSON_NULL);
    case '-': case '0': case '1': case '2': case '3': case '4': case '5': case '6': case '7': case '8': case '9':
        return json_number(r);
    default: return json_fail(r, r->p < r->end ? "value expected" : "text ends too early");
    }
}

static bool json_key(json_reader *r) {
    json_space(r);
    if (r->p == r->end || *r->p != '"') return json_fail(r, "member name expected");
    r->p++;
    if (!json_string(r)) return false;
    json_space(r);
    if (r->p == r->end || *r->p != ':') return json_fail(r, "':' expected");
    r->p++;
    json_space(r);
    return true;
}

/* Inside the innermost container, behind an element or its opening: closes it, or steps to the next element.
 * *more says whether a value follows. */
static bool json_step(json_reader *r, bool first, bool *more) {
    json *c = &r->nodes[r->open - 1];
    bool object = c->type == JSON_OBJECT;
    char close = object ? '}' : ']';
    json_space(r);
    if (r->p == r->end) return json_fail(r, "text ends too early");
    if ((*more = *r->p != close) == false) return json_close(r), true;
    if (!first) {
        if (*r->p != ',') return json_fail(r, object ? "',' or '}' expected" : "',' or ']' expected");
        r->p++;
        json_space(r);
    }
    c->n++;
    return !object || json_key(r);
}

static bool json_document(json_reader *r) {
    json_space(r);
    if (!json_value(r)) return false;
    while (r->open) {
        bool first = r->nodes[r->n - 1].type >= JSON_ARRAY && r->open == r->n, more;
        if (!json_step(r, first, &more)) return false;
        if (more && !json_value(r)) return false;
    }
    json_space(r);
    return r->p == r->end || json_fail(r, "text goes on behind the value");
}

/* Parses one document. Nodes and unescaped strings live in `a`, other strings in `text`. NULL: *e says why. */
static const json *json_parse(arena *a, str text, json_limits limits, toka_err *e) {
    const size_t max_bytes = MIN(limits.max_bytes, (size_t)UINT32_MAX); /* counts are 32 bits */
    if (!text.n) text = STR("");
    json_reader r = {.p = text.p, .start = text.p, .end = text.p + text.n, .a = a, .limits = limits, .e = e};
    if (text.n > max_bytes) {
        fail(e, TOKA_E_INPUT, "JSON: %zu bytes, at most %zu are taken", text.n, max_bytes);
        return NULL;
    }
    json *root = NULL;
    if (json_document(&r)) root = memcpy(arena_alloc(a, r.n * sizeof *root), r.nodes, r.n * sizeof *root);
    free(r.nodes);
    return root;
}

/* ---- Walking ---- */

static bool json_is(const json *v, int type) { return v && v->type == type; }
static const json *json_next(const json *v) { return v + (v->type >= JSON_ARRAY ? v->skip : 1); }

/* for each element `it` of array or each key `it` of object (its value is it + 1) */
#define JSON_EACH(it, array) \
    for (const json *it = (array) + 1, *it##_end = json_next(array); it < it##_end; it = json_next(it))
#define JSON_MEMBERS(key, object) \
    for (const json *key = (object) + 1, *key##_end = json_next(object); key < key##_end; key = json_next(key + 1))

static str json_str(const json *v) { return json_is(v, JSON_STRING) ? (str){v->s, v->n} : (str){"", 0}; }
static bool json_true(const json *v) { return json_is(v, JSON_TRUE); }
static double json_num(const json *v, double otherwise) {
    return !json_is(v, JSON_NUMBER) ? otherwise : v->exact ? (double)v->i : v->f;
}
static int64_t json_int(const json *v, int64_t otherwise) { return json_is(v, JSON_NUMBER) && v->exact ? v->i : otherwise; }

static const json *json_get(const json *object, const char *name) {
    const json *found = NULL;
    if (!json_is(object, JSON_OBJECT)) return NULL;
    JSON_MEMBERS(key, object) if (str_is((str){key->s, key->n}, name)) found = key + 1;
    return found;
}
static const json *json_at(const json *array, size_t i) {
    if (!json_is(array, JSON_ARRAY) || i >= array->n) return NULL;
    JSON_EACH(it, array) if (i-- == 0) return it;
    return NULL;
}

/* ---- Writing ---- */

/* A comma if the last byte ends a value. No value ends in one of "{[:,", a line feed or a space (which may stand before
 * the first value: "data: "), so no state is needed. */
static void json_comma(buf *b) {
    if (b->n && !strchr("{[:,\n ", b->p[b->n - 1])) buf_char(b, ',');
}
static void json_put_open(buf *b, char c) { json_comma(b), buf_char(b, c); }
static void json_put_close(buf *b, char c) { buf_char(b, c); }

/* A string with its quotes; bytes that are not UTF-8 become U+FFFD. */
static void json_put_str(buf *b, str s) {
    json_comma(b);
    buf_char(b, '"');
    for (size_t i = 0, plain; i < s.n;) {
        for (plain = i; i < s.n && s.p[i] >= 0x20 && s.p[i] < 0x7F && s.p[i] != '"' && s.p[i] != '\\';) i++;
        buf_put(b, s.p + plain, i - plain);
        if (i == s.n) break;
        unsigned char c = (unsigned char)s.p[i];
        int n = utf8_len(s.p + i, s.p + s.n);
        if (c == '"' || c == '\\') buf_char(b, '\\'), buf_char(b, s.p[i]);
        else if (c == '\n') buf_c(b, "\\n");
        else if (c == '\t') buf_c(b, "\\t");
        else if (c < 0x20 || c == 0x7F) buf_printf(b, "\\u%04x", c);
        else if (!n) buf_c(b, "\xEF\xBF\xBD");
        else buf_put(b, s.p + i, (size_t)n);
        i += (size_t)MAX(n, 1);
    }
    buf_char(b, '"');
}
static void json_put_key(buf *b, const char *name) { json_put_str(b, str_c(name)), buf_char(b, ':'); }
static void json_put_int(buf *b, int64_t i) { json_comma(b), buf_printf(b, "%lld", (long long)i); }
static void json_put_bool(buf *b, bool v) { json_comma(b), buf_c(b, v ? "true" : "false"); }
static void json_put_null(buf *b) { json_comma(b), buf_c(b, "null"); }

/* The shortest decimal that reads back as the same double (is_float: the same float); null for what JSON cannot say.
 * 15 (6) digits survive a double (float) of the normal range, so shorter ones need no trial there: %g drops final zeros. */
static void json_put_num(buf *b, double f, bool is_float) {
    char z[48];
    if (!isfinite(f)) {
        json_put_null(b);
        return;
    }
    int digits = fabs(f) < (is_float ? (double)FLT_MIN : DBL_MIN) ? 1 : is_float ? 6 : 15;
    for (;; digits++) {
        snprintf(z, sizeof z, "%.*g", digits, f);
        double back = strtod(z, NULL);
        if (digits == 17 || (is_float ? (float)back == (float)f : back == f)) break;
    }
    const char *point = localeconv()->decimal_point, *at = strstr(z, point);
    json_comma(b);
    buf_put(b, z, at ? (size_t)(at - z) : strlen(z));
    if (at) buf_char(b, '.'), buf_c(b, at + strlen(point));
    if (f == 0 && signbit(f)) buf_c(b, ".0"); /* "-0" would be read back as an integer */
}

/* A value that was read, as text again. Recursion is as deep as the reader's limits let it be. */
static void json_put_value(buf *b, const json *v) {
    switch (v->type) {
    case JSON_NULL: json_put_null(b); break;
    case JSON_FALSE: json_put_bool(b, false); break;
    case JSON_TRUE: json_put_bool(b, true); break;
    case JSON_STRING: json_put_str(b, json_str(v)); break;
    case JSON_NUMBER:
        if (v->exact) json_put_int(b, v->i);
        else json_put_num(b, v->f, false);
        break;
    case JSON_ARRAY:
        json_put_open(b, '[');
        JSON_EACH(it, v) json_put_value(b, it);
        json_put_close(b, ']');
        break;
    default:
        json_put_open(b, '{');
        JSON_MEMBERS(key, v) json_put_str(b, (str){key->s, key->n}), buf_char(b, ':'), json_put_value(b, key + 1);
        json_put_close(b, '}');
    }
}

/* ===========================================================================
 * MARK: 5. Unicode [pure]
 * Classes of code points, normal form C, and what becomes of bytes that are not UTF-8.
 *
 * In: UTF-8 text. Out: the same text repaired (uni_repair) or normalized (uni_nfc), and one byte of properties per code
 * point (uni.props), which the tokenizer's patterns are made of. All of it comes from three strings that
 * test/make_unicode.py writes; uni_init unpacks them into a struct that its owner keeps, so there is no global state.
 *
 * Which Unicode: the one whose tokens the models were trained on. Hugging Face `tokenizers` runs its patterns on Unicode
 * 16.0 and its form C on Unicode 9.0. Classes here are of 16.0. For form C the caller chooses: UNI_9 leaves alone what
 * came after 9.0, UNI_16 is today's. Both agree on text of characters that are older than 2017.
 *
 * Always holds: a 32-bit set of classes (1u << class) says what a pattern's \p{..} says; U+110000 and above never occur,
 * because every function but uni_repair takes text that is valid UTF-8. Not here: upper and lower case, forms D, KC, KD.
 * =========================================================================== */

enum uni_class { /* General_Category, and two of its controls apart */
    UNI_LU, UNI_LL, UNI_LT, UNI_LM, UNI_LO, UNI_MN, UNI_MC, UNI_ME, UNI_ND, UNI_NL, UNI_NO, UNI_PC, UNI_PD, UNI_PS, UNI_PE,
    UNI_PI, UNI_PF, UNI_PO, UNI_SM, UNI_SC, UNI_SK, UNI_SO, UNI_ZS, UNI_ZL, UNI_ZP, UNI_CC, UNI_CF, UNI_CS, UNI_CO, UNI_CN,
    UNI_SPACE_CONTROL, /* Cc: \t \v \f U+0085 */
    UNI_LINE_END       /* Cc: \r \n */
};

enum { UNI_9, UNI_16 };

#define UNI_BIT(class) (1u << UNI_##class)
#define UNI_UPPER (UNI_BIT(LU) | UNI_BIT(LT))
#define UNI_MARK (UNI_BIT(MN) | UNI_BIT(MC) | UNI_BIT(ME))
#define UNI_LETTER (UNI_BIT(LU) | UNI_BIT(LL) | UNI_BIT(LT) | UNI_BIT(LM) | UNI_BIT(LO))
#define UNI_NUMBER (UNI_BIT(ND) | UNI_BIT(NL) | UNI_BIT(NO))
#define UNI_PUNCT (UNI_BIT(PC) | UNI_BIT(PD) | UNI_BIT(PS) | UNI_BIT(PE) | UNI_BIT(PI) | UNI_BIT(PF) | UNI_BIT(PO))
#define UNI_SYMBOL (UNI_BIT(SM) | UNI_BIT(SC) | UNI_BIT(SK) | UNI_BIT(SO))
#define UNI_SPACE (UNI_BIT(ZS) | UNI_BIT(ZL) | UNI_BIT(ZP) | UNI_BIT(SPACE_CONTROL) | UNI_BIT(LINE_END)) /* \s */

#define UNI_MAX 0x110000
#define UNI_UNSTABLE 32 /* props: form C may change this character or join it to the one before (NFC_Quick_Check not Yes) */

typedef struct uni_pair { /* canonical decomposition c -> a b */
    uint32_t c, a, b;     /* b 0: c -> a alone */
    bool composes;        /* a b -> c too */
    bool young;           /* after Unicode 9.0 */
} uni_pair;

typedef struct uni_marks { /* code points first .. last have this combining class */
    uint32_t first, last;
    uint8_t class;
    bool young;
} uni_marks;

typedef struct uni {
    uint8_t *props;        /* [UNI_MAX] uni_class | UNI_UNSTABLE */
    uni_marks *marks;      /* [n_marks] rising */
    uni_pair *pairs;       /* [n_pairs] rising in c */
    uni_pair *compositions; /* [n_compositions] rising in (a, b) */
    int n_marks, n_pairs, n_compositions;
} uni;

/* begin of test/make_unicode.py's text */
/* (run length - 1) * 32 + class */
static const char uni_class_text[] =
    "Hf{|Ay|PvsBjpBjjknoniAlHuAlBkAlWojnkqhqWpjokoEl{XfsnCjrnqralowrqroAeq^AlqgamBcnTuoEsUtoFr]^]^]^]^]^]^]^]^]^]^]^]^]^]^"
    "]^]^]^]^]^]^]^]^]^]^]^]^]^]~]^]^]^]^]^]^]^]~]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^}^]^]A|}^]^}^A{~By^}^A{A|}^"
    "}^]^]^}^]~]^}^A{^]^}~a]A|B}]_^]_^]_^]^]^]^]^]^]^]^]~]^]^]^]^]^]^]^]^]~]_^]^A{^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]"
    "^]^]^]^]^]^]^]^]^]Et}^}~]^By^]^]^]^]BH^A_WpP`CkJlLyCzFe`q`OsCTr]^]^`q]^Ax`A|n]CtAo]nA{z]z}^O_zGoAD^]~A{A|]^]^]^]^]^]^"
    "]^]^]^]^]^]Cx]^o]^}~AS_APf]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^rC|Ab]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^"
    "]^}^]^]^]^]^]^]~]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^zAFyA"
    "x`EdAItniAxAppzAMpibnA`nA`nbGlXqCtB}AlJfEmBkAlpAlApIpnwBjAAg`HqR~HuChA_bCHinaExwrDzA^A`rB~A_HuB]ApaLvzwab[kXrAxBZ}Ipa"
    "M`HuABeGtA^rBj`AxbAnS{B~`Gt`B^`C|AxMtzVuB^AxnzIoDrUwqDyzAuDrGtAIw`UxwAAhcAV]bcbaB_FvC]bAaaExHqA`AlHun`MgbAazFuAxA_AxS"
    "{zEwzaBvB}AxbaB_B~AxAaAxAabaGlcCtA_zB]A`AxHuA_AnE]rpanbAxA`czDyCtA_AxS{zEwzA_zA_zA_AxbzB_A`CtA`AxB^BvbFnB}zaFnHuA`B]b"
    "nIhA`czGszB]zS{zEwzA_zC{AxbaB_C|zA`czAabAxaN^A_A`AxHunpFnaDzzbAazFuAxA_AxS{zEwzA_zC{AxbacbcB~AxAaAxAabFnA`cCtA_zB]A`A"
    "xHuraE]IhbazDyBvB]zB}BvA_zazA_BvA_BvB]BvJmCtAabAaBvB_zB_bAxaEpcM`HuBcEhprDrbB_bFuzB]zTyzNeAxbaB^C]zB^zB~FnA`zB]AxaAxA"
    "_A`AxHuFnnE}rabAanFuzB]zTyzHqzC{AxbacbC}zbAazAaA`FnAaEpA_zA_A`AxHuzA_cKdA`AaGszB]zAIwA`aB_B~zB_zB_barCtB]cE}B]A`AxHuG"
    "yrDyzbAazPaBvUwzGszaAxEwBvbCtB_B^zbzFwEpHuAxAanKdAPibA_ExCtpDy`FvnHuAlAFvA_zazC{zUwzazHqbA_GtaAxC{z`zExzHuAxB}AB^aBnM"
    "trnBnA`EhHuHwrbrbrbjkjkAaFuzAE_CtLjcC|nA`C{IpzAE`zGdbEhzApDfClAlAFvAKsAaB~cDzcA`AaA`aHuEdDyAaA`B}B^aB_A_EyB]B~KkbAaA`"
    "D{bacHuB_bApAFyz]Dr]AxAKpn`A|K@yzB}AxEwzazB}AxAIwzB}AxABezB}AxEwzazB}AxMgzAXyzB}AxBFeAxB^H^RcBvNeI`EpBX]AxDvAxiTVurnO"
    "csWsjkBvBMwBjBbFuFnPaB^cHjQ_A`cAlHjPaA`KdKkzB]zA`KdATaA`cExFwbAaIpBj`BjpabAxHuEpHwEpEdiChB^wbHuEpADa`AU_FnC{A`ACcbaDr"
    "BI_IhA@izB^C]A`B_CtAabD{B^CtrBvAlHu[kAxC{JfALqCtWsEpHugBvACtTyA`AabAxAlAU_cbcExzbcbAaFvD{HrAxbHuEpHuEpFb`EdAxLjdNfAR^"
    "B~cAOkbcC|cbC}bAaFuzAlHuFbI`GtHbBjA`c[kcB~AaA`cB^A_HuALqbcA`B_bcB^AaGlChAE_FwFvAaA`BvDfHuBvB]Hu[kDxAlGp]^DrAKoAxA{G`G"
    "lB^nKlcExB}bDybA_cA`aDrALnBBlKh`AC`AE~BCl]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^"
    "]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]Gp]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^"
    "]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]GpFqDvAxDuAxFrFqFrFqDvAxDuAxFrz]z]z]z]FrFqLfAxFrFsFrFsFrFsCxz~"
    "By_q^BmA|z~By_BmBzAx~ByzBmFrCwBmAxA|z~By_AozJ_DoE_AllmjAjmjlG`tuDosH^lmChAfBjojkI|onhH~sDozIeg`AxE]Bkjk`HwBkjkzKjBvAB"
    "tN^KlC^bB`JnN^Ap]Cl]Ap^A{~A{^r]ApoCwEh]r]r]rByr^By^B}^Ap~}Dg]BzroAp^rNkADf]^C`gApCtDgDjAmCloApoApoFfoA@zAmAporoA@zH[y"
    "GdjkjkRnAmFfjkBS|o[|WaAIhEeBKlTrJ^StA[yBQ`T_FC|oHboAVnGaCTboHI`jkjkjkjkjkjkjk[qAM`DgjkA@wjkjkjkjkjkNsHPrDJ{jkjkjkjkjk"
    "jkjkjkjkjkjkBB{jkjkAAujkHRkAPzSiApEeAHjAxAAxzCNnAPeAPf]^A{~]^]^]^By^]~]DvA^A{^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]"
    "^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]~Eh]^]^B^]^DrChgAlAFzz^Dr^AxAW{Fn`nM`bTyHjEwzEwzEwzEwzEwzEw"
    "zEwzEwzAAhAllmlmBjlmnlmH^iAlinlmAllmjkjkjkjkDf`H~AgChinjKxApBjjkjkjkjkiAC|XbzB[lKdGE`XjNvsBjr`afjkjkjkjkjkApjkjkjkjki"
    "jAirGxB~AaiCzApBb`anApzBXaAxA`AoA^aiB[{nA~aDrAKszCCszApCaI`AAgAGlHjrNeA@zzHw[|F{rMmAAxHwAHjMmJTzGYOkBC|YFHa`AJJ}BvAWl"
    "HjAHyDxAlH[k`BjNeHuA_Rv]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^abB`nHrn`]^]^]^]^]^]^]^]^]^]^]^]^]^]^A^A`BI_HvA`"
    "EdGlUgGrAo]^]^]^]^]^]^]A|]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^`Fr]^]^}^]^]^]^]^`Ao]^]^a]^]A|"
    "]^]^]^]^]^]^]^]^]^]^Cw^Cw^]^]^]^]^]^]^]^By^]^}^Ax]^z^z^]^]^]^]StA~]^aA^^EwbB]bB}bTyAaA`cClbBvE]ApprEpATaChGlAaAReNgA`"
    "GlAlHuEpPbDyBjanA_bHuYoFvAlTyIpAaJfnZmBvB^cAOkbAaB~AaA`B_Kxz`HuCtAlC{b`GsHuC{zAIwDzAaA`AaA`HjB]bFubcAxHuAxChNe`DyBnac"
    "bcARebaB^A_A`C{A`abaVnA_`AlIocA`AaAlaA^cbIhDyAxDyAxDyHjEwzEwzAKpqB|Gp`AoCtBRjADaAabAabAancbAxHuEpMKN]KdTyCtAQgCtBLWjG"
    "SCkLGsAxCN}AGtEtKdCxDrabHqoKkzC{zazA_zA_zCPyOsN~LDykjNvBCkAxAV]FnrAB^JmpBnNfFbjknEpNfnAgAfjkjkjkjkjkjkjkjkAljkChBdBjz"
    "ChijkjkjkBjoiBkznpAlCtC{zDNeAxwzBjpBjjknoniAlHuAlBkAlWojnkqhqWpjokojknjkAlHq`AMoA^A@iBvDyAxDyAxDyAxB]BvAnoqrAnzrCiApI"
    "hBsApAxJmzWszQ_zA_zMgAxLiAC|DB}DrBjCtAMuBvHbAUdCaOtAeBnzK|BvrAPbAN^bDJfZmBvAQgN^bXwCtAAgCaHjR]fFufDrAF}C|Dr[kznAE_CtF"
    "unD^AKlAHuAHvBPqAxHuEpAD}CtAD~CtAHyGlATaJfnIkzMczEsz}zIlzMdzEtz~BvATaKdJK{HjS{IhFuVnDxzAJtzGrBHzDyAxazALqzA_BvaAxTyzn"
    "F{TyApE}A@iGlGyAQ`Q_zA_DrD_S{E]BvnWsDrnBDbAW{CtAeA_NkAxANsaB^zA`DrB~B}zB]zZmAxB^CtbGyFnH^FnZmAenZmBcAB^FurYoA`CtD_FbH"
    "jAV]BvFbS{AxF{Q_DrF{PaFnChKdE}BSdBK{AWtAS_LbAS`FnE]AE_B~GlHuEpHuB}`aSwBvC|i`SxGlAmF[tA@ozAJuzA`iAxA_N~B]AWtB~ZmHwaGlS"
    "{IpCaDfTrPaB~ChAGtR}E}RvTyHjcbcAU_MhFbCtRcHubA_A`aHjB^cAMoB_B~AaA`AlwChbIhwAxVuFnHuEpB^AE_C|cFvzHuChaAaaGlADabAlaHjA`"
    "cAPiB_GtAaB}ChB~ncbHuanaBjzRcJfPazVuB_B^AabcA`EdbA_bBBfEwzazB}zMgzHqnEpAOkbB_FvDrHuEpA`AazFuAxA_AxS{zEwzA_zC{zA`aAabC"
    "]AxAaAxB_AxaEpcDrC{AaAxExBvC|JfHqzaAxazAF}zaB_DzzcAxczC]zAabcbabaAlzAlGlA`[dAU_B_FvAaB^cbB}DfHuAlznbB]A@bAPiB_DzcbC]A"
    "`cA`A_naGlHuEPbAOkB_B~AxC]A`cA`UdB}A`AC|APiB_FvAabcA`BjaJfHuEpKxQxAKsbcbAaDzcbanEpHuEpRaZfXqAxbcbAaB~cC|CtHuAeBjrEwFF"
    "^ALqB_GtcA`nCJ^AAcAAdHuGyKdFuAxaAxFuzA_zUwD{zAaAxA`cbacacbBjHjHuBIxFuAxAG{B_B~AxA`C]banacYhaHrAHyDzcaB~G`bGlaDzAaB^AN"
    "mKlcA`BjaDfLbBK{FnH~FCdABenM`HuEpGszAF]cExzDzcbaDfIhHuQeBvAl[kAxS|zcExcA`cA`BLrEwzA_zAF}DzBvbzA`zExabGlHuEpDyzA_zAAgC"
    "}zA`zAabcbaFnHuJKtQ_A`AaAlFnA`acKkzACcAaC|BvAabcbKxHubBW|aN^SaGdCjOtLbnABZ}CK|CSxzDfJfFOsCDPzCFmAlLbAH@aN{bDyMhIhDVGc"
    "DrSO{HEZn[kJnB_B^HuBBG|SBuFnA@izHuCtAlBQozHuEp[kAxC|nIhAPiExDfClB|nrIhHuzE}zR}DrQ_NNnA~AHyA^BjHuFRfAAcAAdU]ChCJ~BMwCt"
    "baAW]FnB~KjBDbA^n`bJfAaM`GJFeGlAMPiAJnHqJTIhB|zEvzA^zIU_N^a[dB]AxaM`B}GlMG{BUPbCO{DrKkBvGsFnHqAxrA`nCqDTDrHApHuEpNR^B"
    "OlANnAxTzHjCXzB@jHGdIhAHjAxB@bAaB^BnD{GiFvApEx[|B~BA`StBExB^rDBvRcKdRcKdBYpHjV{DN~WoWpWoEtzP^WoWp]z}Ax]Ax}AxByzFqBzz^"
    "zEtzIlWoWp}zByAxFqzEszWp}zByzCwz]BvEszWpWoWpWoWpWoWpWoWpWoWpWoYlAxVqoVroDvVqoVroDvVqoVroDvVqoVroDvVqoVroDv]^AxARiQEpA"
    "V~ClARfGdbLzbApDfN^C|zMhAIB~HnaQ|EpDvGDjExzOdAxExzA`zC|DrBAnAB~bCUhAMoBvExEvAxHuCtarJU`[kbO|ALqB~HuDrpOPrXq`B~HuGEh[k"
    "A`aHuCtnPCtEwzB}zA_zMgzFPqAxGyExAJnAC_AC`Ex`CtHuCtAlZJvAZ{rBcpCaBOlAMurMmFNnB}zXqzA_zaAxazHqzB}zazaEpaCtazazazB]zA_za"
    "AxazazazazazA_zaAxB}zEwzB}zB}zazHqzOcDrB]zC{zOcATzAmIB^AM`CtCIxKdMxAxMxzMxzAFnIhKqEKdAXrZ~LbAM`CtHbFnApM`EhEDzHK|DiXL"
    "zCtOtBvK|BvC[tCtCE`EpJ~CtrN^J~CtAXjGlI`EpAIhGl[|AxJ~CtApBBfKKtKdLzAxK|BvI`DrAXjFnMxAxJ^EpHbFnDZ^zCBfHuAFQhAWGZeAB^D[P"
    "yEpGLaAxFYReM`H[DqN^TXqBZXzREgAVQhEY[sDrE@XqABNLTrwA@bCFcDHjHA`BVBF^BVRV}AxBVRV}Ax";
/* gap, run length - 1, combining class * 2 + young */
static const char uni_mark_text[] =
    "VqqMo]]Ms]`L}]]Ms]]Lu]aL}]^K{]`L}]^K{]gL}]a_]`L}]dMo]]Na]]Mo]_L}]_Mo]^L}^_Mo]`L}]]Mo]]Ms]^L}]]Mo]]Mu]^Mw]]Mu]^Mw]]Mu]"
    "iMoH`aMoGx]L}]`Mo]]L}]_Mo]]M_]]L}]bMo]bL}]^Mo]]L}]^Mo]]M_]]Mk]]Mo]]q]]s]]u]]w]]y]]{]]}]]A]]]A_]^Aa]]Ac]]Ae]]Ag^]Ai^]A"
    "k]]Am^]Mo]]L}^]A_BadMo]]Aw]]Ay]]A{Ak]Aq]]As]]Au]]Aw]]Ay]]A{]]A}]]B]]^Mo]^L}]aMo]]L}]^Mo]]L}m]B_B~cMo_`Mo]]L}]]Mo_^Mo^"
    "]L}]^Mo]]L}A^]Ba{]Mo]]L}]^Mo]]L}]^Mo]_L}]]Mo]^L}]]Mo]]L}]_Mo]]L}]]Mo]]L}]]Mo]]L}]]Mo]]L}]^MoDucMo]]L}]]Mof]L~u`Mo^eMo"
    "^_Mo^aMoAf_L}Av^Mp]_L~]`MpAeaMp]aL~]jMo^]L}]^Mo]]L}]^Mo]]L}]_Mo]_L}]]Aq]]As]]Au]_Mo]]L}]^Mo]^L}]aMoAw]km]o`]Mo]]L}]^M"
    "oC^]km]oAk]MpAx]km]oCe]km]oCe]km]oCv]oCe]lm]od]D}]]EiB~]km]oCd^pm]oCs]oCd^F_]]oj`FgCc^F}]]pj`GcBe^L}x]L}^]L}^]LuAr]Gq"
    "]]Gs^]Gwb`Gs_]Gs^^Mo]]o^^MoAy]L}Cg]k^^oBk]L}Ub_Mo[{]o]]p{]oDr]og]MoE~]MkDd]M_]]Mo]]L}Fl]Mo]]L}B`]oqdMo_]L}AkaMo]bL}]^"
    "Mo]]L}^^L~]^Mp]^L~]aMp]]L~]`MpB~]kl]oAa]Mo]]L}]cMoAq^oAu]kh^oA~]kDm_Mo^]_]aL}]^Mo]`L}]]Mo^c_a]L}c]Mo`^MoEy^Mo]]L}]cMo"
    "]]L}]^Mo]]Mw]]Lq]]L}]]K{]A_Mo]]Mt]^Ml]]L~]]Lz]]Mo]]Mu]]L}]]Mo]]L}Uc^Mo]^_]`Mo]__]^Moa]Mo`^_]]Mo]]L}]]Mo]^_]`L}]]MoCFg"
    "_MoDb]oBy|MoPg]Ly]]Mk]]Ms]]M_]^McC`^mACSc]MoafMo}^MoBi^MoHa]oA`]pDl]oxnMoAt_L}A`]oBx]ki]oG^]Mo^^Mo]]L}_^Mob^Mo^]MoAo]"
    "oGe]oUHe]AoVrcMo]cL}]^MoA@r]L}Fs]L}DjaMoAUm]L}^]MoAc]Mo]]_]]L}a]oDz]Mo]]L}Pz`MpA|aMpIh^MpBi_L~B_^L~]_Mp]]L~]]Mp]`L~Al"
    "]Mp]]L~]]Mp]]L~Es]oAd]pk]oAt]o]]kB^_MoAk^oAy]kBe]of]kCa]o]]kEe]k]]oBi]l]]km]oucMo`aMoBr_pCh]o`]kt]MpB|]o]]kGj]o]]kCu]"
    "oCm]o]]kCj]oG|]p]]lGq^pa]lDq]pBl]po]pBj]pLj]oGq]l^^pBj]pLn^pQTi]pBQka_AvcMoAGp^jTQg]_EPk^Lu]__`]Mg]aLuedL}_aMo]^L}{`M"
    "oDi_MoCSjcMo^mMo_cMo^^Mo^aMoB}]MpDucMpK^]MpAx`MpN}^Mt]]L~]]MpGm]Mp]]L~UscL}CdbMo]]k";
/* gap * 6 + kind * 2 + young, first, second (not for kind 2, one alone) */
static const char uni_pair_text[] =
    "AE{CyAQcc]_c]_c]_c]gc]aiaAucaBfc]_c]_c]icelc]_c]_c]iigfc_bc]_c]_c]_c]goilc]_c]_c]icejom^c]_c]_c]_c]gc]aiaAucaBfc]_c]_"
    "c]icelc]_c]_c]iigfc_bc]_c]_c]_c]goilc]_c]_c]iceji]kcCfdcA{]cAzacA{]cAzB]cA{]cAvBfcA{]cAz_cA{]cAzgcA{]cAzgcA{]cAx]cA{]"
    "oAxlcA{]cAzacA{]cAz_cA{]cAzA}cA{]cAzArcA{]cAvpcA{]cAzecA{]cAz_cA{]cAzA{cA{]cAxBbcA{]oAx_cA{]cAz_cA{]cAzacA{]cAzB]cA{]"
    "cAzA|u_fcA{]cAxBccA{]iAxBdcA{]cAzBecA{]cAzApcA{]{AvrcA{]cAzBecA{]cAzApcA{]uAxlcA{]cAzacA{]cAzgcA{]oAtpcA{]cAzBecA{]cA"
    "zApcA{]cAxrcA{]cAz_cA{]cAzBccA{]cAzApcA{]cAxAqcA{]cAzApcA{]oAxncA{]cAz_cA{]cAzacA{]cAzecA{]cAz_cA{]cAzAucA{]cAvBdcA{]"
    "cAv]cA{]cAzic_jcA{]cAzicA{]cAzgcA{]F]Bn{cA{]BmAn]cA{]EaC^zcA{]cAj]cA{]cAn]cA{]cAn]cA{]cF_lcA{]cAzbcA{]cAzscA{]cAztcA{"
    "]iCfecA{]cR}]c_]cTv]cA{]oIhmcA{]cAr]cA{]cArAscA{]cVgB`c_]cC^mcL{]cADl]uB^rcA{]oAl^cA{]cEa_cA{]cAx]cA{]cx]cA{]cJvycA{]"
    "cAzacA{]cAr`cA{]cAzacA{]cAr`cA{]cAzacA{]cAn`cA{]cAzacA{]cAt`cA{]cAzacA{]cAt`cA{]cAzacA{]cA~AecA{]cAx]cA{]oBpAncA{]AeB"
    "ffcA{]cArA{cA{]cFsB^cA{]cA|]cA{]cIvccA{]cZgbc_]c[r]cA{]ASqAJ_g_mA_erbHqDrA{AInAeFk]cAOy]gAN|cAOc]ca]ca]ii]ii]ce]cA}]D"
    "qBzkcu]cujce]ca]ca]cA_]DqA^kcu]chjci]ce]{o]c]kGwC}lc]mi`juvk{Acjc`^csiA}r]EsA{]D_bhc]mi`juB_k{Arjc`^csiDeB{oc_]M_Epnc"
    "A{]BmBd]cA{]cAzacA{]oAp`cA{]oIqac_]cKl]cA{]cAx]cA{]oAxdcA{]cAzecA{]cAn]cA{]oJ]]c_]cK^]cA{]cBldcA{]cAzecA{]cAzccA{]cAr"
    "bcA{]oAr]cA{]AXkA@]AUqc]_cA}]cA|_cB_^[cHc]iAb]C]A]]CUoAGcAOwAkm]oc]FkAv]e_]e_]eg]eg]e_]eo]ee]S_H}Gsc]AmB{BdApe_]kw]N{"
    "GuGoqi]FeA~]e_]eg]q{]AMgPuPqo]Ajc]AmB{BdApe_]IuFqIaIoC_Alc_]c^AmU{GoGmUcGaGmAek]c]_i]AbceAaVkGgFcc_]c^AmY_HsFwi]gccfc"
    "bAeBG_Ue[wAyq]}g]}g]}g]BiAp`AyB{C|k]aeCyuk_]AsCz]CeA}CeAyq]}g]}g]}g]BiAp`SeHwGaQOgEWwEZ_ia]ia]ia]ia]ue]GeBk]ia]oa]c_]"
    "ic]DKuNNrLZhcA{]cAxAvcA{]cAzAscA{]cAzycA{]cE}BxcA{]cIpicA{]cAzAscA{]cAzycA{]cAzpcA{]cAzicA{]cJeBrc_]c^_c_]cL`BqcA{]cA"
    "zccA{]cZoBlc_]cA@j_cA{]cAxbcA{]cAxccA{]cAzAscA{]cAzApcA{]cAzAycA{]cAzkcA{]cAxacA{]cF]BvcA{]cIr]cA{]cAzB]cA{]cAzycA{]c"
    "AxxcA{]cP@qAxc_]cPBnBscA{]cAzdcA{]cAxBpcA{]cAzicA{]cAzAscA{]cAxArcA{]cAzAscA{]cAzycA{]cAzdcA{]cF_BpcA{]cAzkcA{]cEalc_"
    "]c^_c_]cNz]cA{]cAzicA{]cAv]cA{]cAzAscA{]cPBiAxc_]cPDfBscA{]cAxBlcA{]cAzAscA{]cMqArc_]cg]c_]cOPw]c_]cPDr]cA{]cAzAscA{]"
    "cAzycA{]cAzdcA{]cAxncA{]cAzucA{]cAzbcA{]cNgBpc_]c_kc_]cPffcA{]cAzA{cA{]cAxB^cA{]cAz_cA{]cAzkcA{]cAz^cA{]cAzAscA{]cAxA"
    "rcA{]cAz_cA{]cAx^cA{]cAxfcA{]cAzA}cA{]cAzycA{]cA^]cuBjccaca]iOkb{RtAscA{]cAzAncA{]cEulcA{]cAz^cA{]cAzocA{]cAzhcA{]cO["
    "{^c_]cOZ^^c_]c^^c_]c^oc_]c^hc_]cOY}cc_]cPIbAucA{]cAzAncA{]cAzhcA{]cE}`cA{]cAz^cA{]cAzocA{]cAzhcA{]cP@y^c_]cPJhkcA{]cA"
    "zAocA{]cAn]cA{]cAzAncA{]cE}lcA{]cAz^cA{]cAzocA{]cAzhcA{]cPAk^c_]cOSh^c_]c^^c_]c^oc_]c^hc_]c^A{c_]cSn]cA{]cAzAncA{]cRm"
    "lc_]c^^c_]c^oc_]c^hc_]c^A{c_]cTbB^cA{]cAzB_cA{]cAzAncA{]cAzhcA{]AeATm}c]_cNSeAbc_]c^_c_]c^Cyc_]cNUbBvc]_cNUqAbc_]c^_c"
    "_]c^Cyc_]cNSnBvc]_cNS}Abc_]c^_c_]oNUzA_c]_cNVgAbc_]c^_c_]oNThA_c]_cNTwAbc_]c^_c_]c^Cyc_]cNVtBvc]_cNWaAbc_]c^_c_]c^Cyc"
    "_]cNUbBvc]_cNUqAbc_]c^_c_]c^Cyc_]cNWnBvc]_cNW}Abc_]c^_c_]c^Cyc_]cNUvBvc]_cNVcAbc_]c^_c_]oNX`A_c]_cNXoAbc_]c^_c_]oNVhA"
    "_c]_cNVwAbc_]c^_c_]c^Cyc_]iNXtBtiNYcAbi]_i]CycNW^Bvc]_cNWmAbc_]c^_c_]c^Cyc_]cNYjBvc]_cNYyAbc_]c^_c_]c^Cyc_]cNYjCzgfco"
    "]glcq]gncs]gpc}]gwcj]gmcd]ggoNQoD_c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]cA]]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c"
    "_]c_]c_]c_]cB{]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]cNYvCtc]`cNYyCycNYx]cf]igbcOA}ccOCxCtc]`c]dgrcsD_mBioARbb"
    "cPOwccNYt]cn]iobcOBoccODnD^gvc{]gxcyD_cOD]D^c]_c]CycOA~Cnc]`cA]dgCjoBkC{cA]]cBzCnc]`c]dgziOHm]c]_c]CycOD~Cnc]`cidgApc"
    "A]Aac]_ceBuci]cBdCnc]`c]dgAhcAaAccAPvAbgAOagAShoPTmD_cNY`]cg]ifbcODgccOFvD^gA`cAu]gAncAoD_gAPnsPWkg_AWyOF|yAVtgGcSqQQ"
    "yvca]Cia]EmCo]ce]c`]IiB{]{g]oc]DeAk]ia]DwAi]ok]oa]ic]D_RHr]iRJa]A}Ab]cRH~]ca]cRJe]c_]ow]c_]oc]c_]Aec]c_]ok]c_]oc]c_]F"
    "cAq]ci]c_]ca]HsBv]c_]cAc]c_]AeA{]c_]c_]c_]JuGDsg_LKuBUz]HUsBYwXKiia]ia]ia]ia]ia]ia]ia]ia]ia]ia]ia]oc]ia]ia]Aek]c]_ic^"
    "c]_ic^c]_ic^c]_ic^c]_D_C`^AwEa]Bmy]ia]ia]ia]ia]ia]ia]ia]ia]ia]ia]ia]oc]ia]ia]Aek]c]_ic^c]_ic^c]_ic^c]_ic^c]_D_C`^oDg]"
    "c_]c_]c_]us]KNSwAUBwgTB`gUK{gABdgPCdgQOdgCAygALTcg]gAIVngABJygADKzgB@ogDRugJ[}gDYcgCQggVggRugDBggTTngARsgB@igAQmgHVog"
    "GBkgDPkgALO|gBRogLRwgCVwgJVegLXogAFWzgJ@cgKUogAZ_gTUhgPSugCJogVFjgDM]gCKegB[{gPA_gAGC^gAE]gQigIQogCGegCY]gBP{gDY_gCFs"
    "gE_gDB_gD[mgBGygAJggTCrgNggBFcgCHwgHEigFD{gJP^gZXjgCHogOVagBF]gGPlgCLmgJTugEMugAEKlgAYggGJcgB@{gRcgGPugOogLZqgAHH^gXP"
    "ogYB~g|gUS_gAZugCIigIZygEX~gUXvgCXkgQTugADS`gGJ]gBFwgJM]gA@wgRMdgTJqgVD|gHOsgIMbgPO]gCZhgLTigVF~gBMigPMigGD]gCL_gPQzg"
    "SIogRYjgECrgQDkgPVzgIOqgTV~gAMagEsgLFagJ[cgB[ggDNggCUegAEVlgSqgBVcgBZkgCSagEM}gDZagOIigBOigBF{gCegAL[lgJWugBNsgSH{gZH"
    "xgARygFqgAKcgERsgADigAT}gBWagBFugAIigGYqgEMzgF@wgASmgAGAxgHegACsgOBggLY_gA@ugWPvgQsgAY_gDKmgHYkgDTfgSRrgDIugBReg[mgAG"
    "{gJN}gJwgF@ogJagIR]gBOsgDygLegAK@ngVRogLYwgBSogA@ZvgIXjgAG_gEZygDwgE@ygBJkgDEkgBK_gGYwgFEcgHB{gABRrgYQogAHJrgKGkgG_gB"
    "W{gTkgBYugSwgARegBM}gNScgAJDfgI@ggA@CkgAIVrgFZugIAegQXugYQ`gY}gCRwgFDegRW]gAHUlgA@qgDMogEEwgRogTigBGygCWigA@]gEDkgE@q"
    "gA_gDVggBTqgAHJngNUygNHvgO[egAM{gIIwgHZ{gCA{gAFigAAPtgCIkgJV{gCW`gE]gUwgEGzgADjgNJwgADPlgA@F]gZIrgB~gFV_gBF{gM[ugQYtg"
    "IM]gCLpgUVggCTjgGN{gFX`gV[fgGHjgBKwsAKcmGPisKA~gQYkgAZqgAHygB]gkgBmgP@kgNHlgAQamCKimBQwsBW_gKqyDGsgwgBqgBLmgFYfgCD_gA"
    "JEtgRkgF]gVigAqgFkgAFqgFcgEwg[wgFagB@egqgBFmgLmgBegE{gAVsgHsgJggAAkgBRmgIqgOogAFqgKagAAqgBJwgJcgsg^gmgigkgByg_gJmgCyg"
    "RwgAEcgAegCggQ}gHsgA@ugHeg]gA@agBOagG{gUigCggXagCagALigGsgCPkgPugCogAA[zgIGMmgHQJ|s[ZdgAYqgDngA@tgZsgCmgSegC]gAKugDdg"
    "D]gDggAIcgEegHog}gO{gKsgA[cgkgHmgD]gQqgF}gD`gG{gBtgHqgC{gWogEcgCcgOggPygIqgegCmgBFggCygW]gXag|gEagNygSwgCIugBY~gGcgGe"
    "gSegHwgCagMggagJ_gA]gAmgE_gpgWggA@ogO}gK]gMcgI]gSkgKugAUugIegAYggZygD_g}gQmgCigBrgCcgbg~gDmgDwgVmgAD}gRmgQigM]gBDqgF_"
    "gFwgGygBagugBygANwgBLigGOEgghgFFcgISD|gBKmgA}gJEBagERogRHcgIEYrgDkL_BZRrWA|kAmcB]nqe]_eDS[_^e]_eDT@nre]_e]ee_]e_]e_]e"
    "_]e_]e_]ka]e_]e_]e_]e_]ka]ka]e_]ka]e_]ka]e_]e_]e_]e_]eAdbedieq]eo]PYnDYR]AL|Dxm]QG{EUyEEAiia]Bsq]WaHeFkc_]CKgACiACmc]"
    "AmIvCmFujaxArkkpgkIdB}jj]pd]A]AN{NoNcc]pi]wAPmO]Nec_]EQrAXmAXwDD@tAJR{AJScd]sd]pds]dr_dc^d_]d^_SUlFPyFP{dd]di]EUGqAYT"
    "yAYUwe_]ekoe]_e]_e]_e]_OkEgve_]e_oe_]e^_e_]PZUgGLKdgfgogHIXwgHIGzgDqgwgDcgG_gAygDqgAjgODngHZKogHJ[pgkg}gAagHJHggHYU`g"
    "OK{gBegHJIwgHJIbgwgANxgAOggogKAXigKATpgygORxgOVagsgBqgggOVlgO[cgagAqgAggsg_gA]gB}gmgogAmgqgag]g]gHKY}gGXJ`gOKjgAegHLJ"
    "qgHLIzgigAegH}gE~g}gA{gCkgD}gAogC}g}gA}g]gAegA_gmg{gT]gO~gP_gKrgB_gBJrgCS}gP|gBegAmgGrgIyg^gGegHNYkgHNUfggg{gAcgmgCwg"
    "HOMggC{gHOI^gBwgugDrgHigSB`gygSJygCcg]gHPDigHOXngAeg{gugHPMmgHPLvgkgAUugAT^gSSpgSWegygDygB~gHQRogHQGxgHQG}gHQEjgbgA]g"
    "E}g_gTGtgTIggBogAegBqgTLrgIKAugIK@bgTOggcgcgAcgKDI{gKDFxgHSEqg]gH@JhgRU`g]gTQpgITB{gYIwgIXSfgogTTdgTW]gC]gqgB]gH]gUCl"
    "gAvgUFigHTHmgHTElgGqgegag`gBugAcgBagxgsgBwgAcgegAogsgC{gD}gB_gGggHUBygHUC|gCxgFigAqgEugHUGqgHUC|gElgArgVHrgVS}gAegAyg"
    "BdgVQ`gWAygAugHVRegHVKdgPggJfgWFhgWJqgWKpgB`gLEogcgKNogEzgN@ogADS~gRZugegigCqgrgHWQsgISHxgXA]gFzgL_gC]gHWIsgHWI`gFngN"
    "kgXLrgXOigEugDcgKcgHWJwgHWGvgYDbgYHggHXF]gHXB~gYH`gYI{gBsgAqg_gHXYogOXhgPBwgHXWfgHYUwgHYO`gygE~gJggBigCigCbgBig{gwgHY"
    "IegHYM~gNwgCugZMhgZRygdgHYO{gHY[~gU}gHYNigBygHYK~gFwgApgbg[Dvg[GogC]ghgCcgGUNygGUEzgHZDagHYZ~gHZRggHZJ^gwgAqgH[OggH[L"
    "lgAegI@@}gMagI@@pgA]gA@LbgA@MugA@L~g]gA@VogAegAegAcgD_gA@XjgAAAugIAIwgIAHdgIAMsgIAJtgHFG}gHEZngIBSigAigHegJDCfgugAAO_"
    "gIBYyg^gBggAogIB[`g_g]gBogAAQdgAAU_gAATfgDugJEXcgICY`gCsgCwgABA|gJFVggIDLdgIDS_gBogIDRdgEkgABNhgABSigqgggIESygQqg]gIF"
    "@^gABQbgJIDogIFBrgcgAB[zgJIN{gIE[jgACHhgACIsgfgAugIGNegIGHjgACKbgACQ_gCmgC}gACUlgJL@egAygJK[zgJLHmgIGZ~gIHD}gIHChgE}g"
    "sgIHU]gDggIHS|gIH[wgIHZxgHIYqgINNdgADTogDwgADV`gADYqgTTfgJBI_gygA@A^gogHIEpgcgGHygALLjgAEK{ghgA_gYUngYVugagqgBkgIJQwg"
    "IJQxgCggDagDigH`gI_gBmgFqgOfgG]gag}gIJR]gRcgHxgJPSjgAFHigagB_gINAsgIMY^gIKKogJQWtgegJRCggQ]gJRStgAFYegugsgagCwgA|gG{g"
    "BpgH{gDvgC}gAqgAGI`gAGNmgA{gAGNhgAGS}gcgIMSggIMLlgkgAGWxgAGYmgAQHrgKCYigJygJVP|gogAHMugDogIegK}gINZ_gINT~gAggEggEkgIO"
    "S_gBHBngGGKpgzgC_gGGVegGGHxgE{gIRHqgAqgIQQtgEmgA{gIRAegIR@rgPwgIig_gEjgVkgAsgIS@_gIRF^gALWzgALZmgIRY{gKCSpgAMImgABShg"
    "ABY]gITEwgLogKEYjgmgAMQwgIUHigKFVpgKGBygIUN^g]gAwgIVAegIURhgAMUxgAMZ]gGkgAqgCogANAjgKJAogIWKzgQwgKagAOClgAygAOG{gIYEi"
    "gKLLpgKLOygOqgGugIYKzgAOUtgAOYigggkgqgkgBcgI[@_";
/* end of test/make_unicode.py's text */

/* ---- Unpacking ---- */

static uint32_t uni_number_of(const char **p) { /* one number of the table text */
    uint32_t v = 0;
    while (**p < 93) v = v * 28 + (uint32_t)(*(*p)++ - 64);
    return v * 34 + (uint32_t)(*(*p)++ - 93);
}
static uint32_t uni_signed_of(const char **p, uint32_t base) { /* base plus a zigzag coded difference */
    uint32_t v = uni_number_of(p);
    return v & 1 ? base - (v + 1) / 2 : base + v / 2;
}

static int uni_by_parts(const void *a, const void *b) {
    const uni_pair *x = a, *y = b;
    if (x->a != y->a) return x->a < y->a ? -1 : 1;
    return x->b < y->b ? -1 : x->b > y->b;
}

static void uni_init_classes(uni *u) {
    uint32_t at = 0;
    for (const char *p = uni_class_text; *p;) {
        uint32_t v = uni_number_of(&p), n = v / 32 + 1;
        memset(u->props + at, (int)(v % 32), n);
        at += n;
    }
    assert(at == UNI_MAX);
}

static void uni_init_marks(uni *u) {
    uint32_t end = 0;
    u->marks = mem_alloc(sizeof uni_mark_text * sizeof *u->marks); /* more than enough; cut below */
    for (const char *p = uni_mark_text; *p;) {
        uint32_t first = end + uni_number_of(&p), last = first + uni_number_of(&p), v = uni_number_of(&p);
        u->marks[u->n_marks++] = (uni_marks){first, last, (uint8_t)(v / 2), v & 1};
        for (uint32_t c = first; c <= last; c++) u->props[c] |= UNI_UNSTABLE;
        end = last + 1;
    }
    u->marks = mem_realloc(u->marks, (size_t)u->n_marks * sizeof *u->marks);
}

static void uni_init_pairs(uni *u) {
    uint32_t c = 0, a = 0, b = 0;
    u->pairs = mem_alloc(sizeof uni_pair_text / 2 * sizeof *u->pairs);
    for (const char *p = uni_pair_text; *p;) {
        uint32_t v = uni_number_of(&p), kind = v / 2 % 3;
        c += v / 6;
        a = uni_signed_of(&p, a);
        if (kind != 2) b = uni_signed_of(&p, b);
        u->pairs[u->n_pairs++] = (uni_pair){c, a, kind == 2 ? 0 : b, kind == 0, v & 1};
        u->props[kind == 0 ? b : c] |= UNI_UNSTABLE;
    }
    u->pairs = mem_realloc(u->pairs, (size_t)u->n_pairs * sizeof *u->pairs);
    u->compositions = mem_alloc((size_t)u->n_pairs * sizeof *u->compositions);
    for (int i = 0; i < u->n_pairs; i++)
        if (u->pairs[i].composes) u->compositions[u->n_compositions++] = u->pairs[i];
    qsort(u->compositions, (size_t)u->n_compositions, sizeof *u->compositions, uni_by_parts);
    for (uint32_t j = 0x1161; j <= 0x1175; j++) u->props[j] |= UNI_UNSTABLE; /* Hangul vowels and finals join backwards */
    for (uint32_t j = 0x11A8; j <= 0x11C2; j++) u->props[j] |= UNI_UNSTABLE;
}

static void uni_init(uni *u) {
    *u = (uni){.props = mem_alloc(UNI_MAX)};
    uni_init_classes(u);
    uni_init_marks(u);
    uni_init_pairs(u);
}
static void uni_free(uni *u) {
    free(u->props), free(u->marks), free(u->pairs), free(u->compositions);
    *u = (uni){0};
}

/* ---- UTF-8 ---- */

/* The code point at p and its bytes. Text must be valid. */
static inline uint32_t uni_next(const char *p, int *n) {
    unsigned char a = (unsigned char)p[0];
    if (a < 0x80) return *n = 1, a;
    uint32_t b = (unsigned char)p[1] & 63;
    if (a < 0xE0) return *n = 2, (a & 31u) << 6 | b;
    b = b << 6 | ((unsigned char)p[2] & 63);
    if (a < 0xF0) return *n = 3, (a & 15u) << 12 | b;
    return *n = 4, (a & 7u) << 18 | b << 6 | ((unsigned char)p[3] & 63);
}

/* Bytes at p that are no character and become one U+FFFD: the longest beginning of a character that is cut short there,
 * else 1 (Unicode 3.9, substitution of maximal subparts, as Python and Rust do). *cut: the text ended, more bytes could
 * complete it. */
static int uni_bad_len(const char *p, const char *end, bool *cut) {
    unsigned char a = (unsigned char)p[0];
    unsigned lo = a == 0xE0 ? 0xA0 : a == 0xF0 ? 0x90 : 0x80, hi = a == 0xED ? 0x9F : a == 0xF4 ? 0x8F : 0xBF;
    int whole = a >= 0xC2 && a <= 0xDF ? 2 : (a & 0xF0) == 0xE0 ? 3 : a >= 0xF0 && a <= 0xF4 ? 4 : 1, n = 1;
    for (; n < whole && end - p > n && (unsigned char)p[n] >= lo && (unsigned char)p[n] <= hi; n++) lo = 0x80, hi = 0xBF;
    *cut = n < whole && end - p == n;
    return n;
}

/* The text itself where it is valid UTF-8, else a copy in *b with U+FFFD for what is not. */
static str uni_repair(str s, buf *b) {
    const char *p = s.p, *end = s.p + s.n, *done = s.p;
    bool cut;
    buf_clear(b);
    while (p < end) {
        uint64_t w = 0;
        while (end - p >= 8 && (memcpy(&w, p, 8), !(w & 0x8080808080808080u))) p += 8;
        if (p == end) break;
        int n = utf8_len(p, end);
        if (n) {
            p += n;
            continue;
        }
        buf_put(b, done, (size_t)(p - done));
        buf_c(b, "\xEF\xBF\xBD");
        done = p += uni_bad_len(p, end, &cut);
    }
    if (done == s.p) return s;
    buf_put(b, done, (size_t)(end - done));
    return buf_view(b);
}

/* ---- Normal form C ---- */

typedef struct uni_run { /* code points under work, each with its combining class above bit 24 */
    uint32_t *p;
    size_t n, cap;
} uni_run;

enum { UNI_S = 0xAC00, UNI_L = 0x1100, UNI_V = 0x1161, UNI_T = 0x11A7, UNI_V_N = 21, UNI_T_N = 28, UNI_S_N = 11172 };

static int uni_combining(const uni *u, uint32_t c, int version) {
    int lo = 0, hi = u->n_marks;
    if (!(u->props[c] & UNI_UNSTABLE)) return 0;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (u->marks[mid].last < c) lo = mid + 1;
        else hi = mid;
    }
    if (lo == u->n_marks || c < u->marks[lo].first || (u->marks[lo].young && version == UNI_9)) return 0;
    return u->marks[lo].class;
}

static const uni_pair *uni_find_pair(const uni *u, uint32_t c, int version) {
    int lo = 0, hi = u->n_pairs;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (u->pairs[mid].c < c) lo = mid + 1;
        else hi = mid;
    }
    if (lo == u->n_pairs || u->pairs[lo].c != c || (u->pairs[lo].young && version == UNI_9)) return NULL;
    return &u->pairs[lo];
}

/* The character that a and b make, 0: none. */
static uint32_t uni_compose(const uni *u, uint32_t a, uint32_t b, int version) {
    if (a - UNI_L < 19 && b - UNI_V < UNI_V_N) return UNI_S + ((a - UNI_L) * UNI_V_N + (b - UNI_V)) * UNI_T_N;
    if (a - UNI_S < UNI_S_N && (a - UNI_S) % UNI_T_N == 0 && b - UNI_T - 1 < UNI_T_N - 1) return a + (b - UNI_T);
    int lo = 0, hi = u->n_compositions;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        const uni_pair *m = &u->compositions[mid];
        if (m->a < a || (m->a == a && m->b < b)) lo = mid + 1;
        else hi = mid;
    }
    const uni_pair *f = &u->compositions[lo];
    return lo < u->n_compositions && f->a == a && f->b == b && !(f->young && version == UNI_9) ? f->c : 0;
}

static void uni_push(const uni *u, uni_run *r, uint32_t c, int version) {
    if (r->n == r->cap) r->p = mem_realloc(r->p, (r->cap = MAX(r->cap * 2, (size_t)64)) * sizeof *r->p);
    r->p[r->n++] = c | (uint32_t)uni_combining(u, c, version) << 24;
}

/* Appends the full canonical decomposition of c. Only first parts decompose further, so a stack of last parts is enough. */
static void uni_decompose(const uni *u, uni_run *r, uint32_t c, int version) {
    uint32_t last[8];
    int n = 0;
    if (c - UNI_S < UNI_S_N) {
        uint32_t i = c - UNI_S, t = i % UNI_T_N;
        uni_push(u, r, UNI_L + i / (UNI_V_N * UNI_T_N), version);
        uni_push(u, r, UNI_V + i / UNI_T_N % UNI_V_N, version);
        if (t) uni_push(u, r, UNI_T + t, version);
        return;
    }
    for (const uni_pair *d; n < COUNT(last) && (d = uni_find_pair(u, c, version)); c = d->a)
        if (d->b) last[n++] = d->b;
    uni_push(u, r, c, version);
    while (n) uni_push(u, r, last[--n], version);
}

/* Sorts each stretch of marks by class, stable, in linear time: a text may be one megabyte of marks. */
static void uni_reorder(uni_run *r) {
    uint32_t *sorted = NULL;
    for (size_t i = 0, j; i < r->n; i = j + 1) { /* [i,j) is a stretch of marks; it ends at a starter or the end */
        bool ordered = true;
        for (j = i; j < r->n && r->p[j] >> 24; j++) ordered &= j == i || r->p[j - 1] >> 24 <= r->p[j] >> 24;
        if (ordered) continue;
        size_t at[257] = {0};
        for (size_t k = i; k < j; k++) at[(r->p[k] >> 24) + 1]++;
        for (int k = 0; k < 256; k++) at[k + 1] += at[k];
        if (!sorted) sorted = mem_alloc(r->n * sizeof *sorted);
        for (size_t k = i; k < j; k++) sorted[at[r->p[k] >> 24]++] = r->p[k];
        memcpy(r->p + i, sorted, (j - i) * sizeof *sorted);
    }
    free(sorted);
}

/* Joins in place (Unicode 3.11, D117): a character joins the last starter unless one between them has the same or a higher
 * class. Then writes all of it to out. */
static void uni_recompose(const uni *u, uni_run *r, buf *out, int version) {
    size_t starter = SIZE_MAX, w = 0;
    uint32_t before = 0; /* class of the character written last behind the starter, 256: the starter itself is last */
    for (size_t i = 0; i < r->n; i++) {
        uint32_t c = r->p[i] & 0xFFFFFF, k = r->p[i] >> 24, joined = 0;
        if (starter != SIZE_MAX && (before == 256 || before < k))
            joined = uni_compose(u, r->p[starter] & 0xFFFFFF, c, version);
        if (joined) {
            r->p[starter] = joined;
            continue;
        }
        if (!k) starter = w, before = 256;
        else before = k;
        r->p[w++] = r->p[i];
    }
    for (size_t i = 0; i < w; i++) {
        char z[4];
        buf_put(out, z, (size_t)utf8_put(z, r->p[i] & 0xFFFFFF));
    }
    r->n = 0;
}

/* Text in form C: the text itself where a quick check finds nothing to do, else a copy in *b. Each stretch from the stable
 * character before an unstable one up to the next stable one is worked on by itself. */
static str uni_nfc(const uni *u, str s, int version, buf *b) {
    const char *p = s.p, *end = s.p + s.n, *done = s.p, *stable = s.p;
    uni_run r = {0};
    int n;
    buf_clear(b);
    while (p < end) {
        uint64_t w;
        while (end - p >= 8 && (memcpy(&w, p, 8), !(w & 0x8080808080808080u))) p += 8, stable = p - 1;
        if (p == end) break;
        uint32_t c = uni_next(p, &n);
        if (!(u->props[c] & UNI_UNSTABLE)) {
            stable = p, p += n;
            continue;
        }
        buf_put(b, done, (size_t)(stable - done));
        for (p = stable; p < end; p += n) {
            c = uni_next(p, &n);
            if (p > stable && !(u->props[c] & UNI_UNSTABLE)) break;
            uni_decompose(u, &r, c, version);
        }
        uni_reorder(&r);
        uni_recompose(u, &r, b, version);
        done = stable = p;
    }
    free(r.p);
    if (done == s.p) return s;
    buf_put(b, done, (size_t)(end - done));
    return buf_view(b);
}

/* ===========================================================================
 * MARK: 6. Tokenizer [pure]
 * tokenizer.json to ids and back, equal to Hugging Face `tokenizers` 0.23.
 *
 * In: the text of tokenizer.json, then UTF-8 text or ids. Out: ids or text. A text takes this way (HF's names in brackets):
 *
 *   text -> repaired UTF-8 -> cut at added tokens -> form C, prepend, replace -> cut at added tokens of normalized text
 *                             [added_tokens]         [normalizer]               [added_tokens]
 *        -> cut into pieces by patterns -> byte pair merges per piece -> ids between the ids of the post-processor
 *           [pre_tokenizer]                [model]                       [post_processor]
 *
 * Supported: the BPE model, on bytes (GPT-2, Llama-3, Qwen, GPT-4o, DeepSeek ...) or on characters with byte fallback
 * (Llama-2, Mistral, Phi-3 ...). Patterns are recognised by their exact text in tok_rules, each is one row of parameters
 * for tok_match; there is no regex engine. What is not known is an error at load that quotes it: nothing is guessed.
 *
 * Always holds: a tok does not change after tok_load but for the memory of pieces (tok_slot), which any thread may read
 * and write at any time and which only ever says what the merges would say. Every step is linear in the text but the
 * merges of one long piece, O(n log n). Nothing in a tokenizer.json can make it crash or take more than a constant times
 * its size.
 *
 * Not here: training, offsets, pairs of texts, truncation and padding (they are read over), dropout. Of
 * tokenizer_config.json nothing is used, as `tokenizers` alone does not know it either.
 * =========================================================================== */

#define TOK_FAIL(...) fail(e, TOKA_E_INPUT, "tokenizer.json: " __VA_ARGS__) /* in a function with a parameter e */

typedef struct tok tok;

static int tok_load(tok **out, str tokenizer_json, str config_json, toka_err *e);
static void tok_del(tok *t);

/* ---- Patterns that cut text into pieces ---- */

/* One pattern as parameters of tok_match. The alternatives of all known patterns come in this order; a row says which:
 *   1 contraction   's 't 're 've 'm 'll 'd
 *   2 ascii_word    one ASCII punctuation mark or symbol and the ASCII letters behind it
 *   3 letters       a run of these, one of `head` (spaced: one space) may stand before it; cased: upper, then lower case
 *   4 digits        a run of numbers, at most so many (spaced: one space may stand before it); newer: of Unicode 17.0
 *   5 marks         a run of these, one space may stand before it, `tail` characters behind it
 *   6 lines         white space up to its last line end
 *   7 spaces        white space, all but its last character if text follows that is none, but at least one
 *   8 cjk           a run of CJK ideographs U+4E00 .. U+9FA5, Hiragana and Katakana */
typedef struct tok_rule {
    const char *regex; /* as it stands in tokenizer.json; NULL: made from a pre-tokenizer without a pattern */
    enum { TOK_NO_CONTRACTION, TOK_EXACT, TOK_ANY_CASE } contraction;
    bool ascii_word, spaced, cased, suffix; /* suffix: alternative 1 may end alternative 3 instead */
    uint32_t head, letters, marks;          /* sets of uni_class */
    int digits;
    const char *tail;
    bool lines, spaces, cjk, newer;
} tok_rule;

#define TOK_HEAD ~(UNI_BIT(LINE_END) | UNI_LETTER | UNI_NUMBER)
#define TOK_MARKS ~(UNI_SPACE | UNI_LETTER | UNI_NUMBER)
#define TOK_UPPER (UNI_UPPER | UNI_BIT(LM) | UNI_BIT(LO) | UNI_MARK)
#define TOK_LOWER (UNI_BIT(LL) | UNI_BIT(LM) | UNI_BIT(LO) | UNI_MARK)

static const tok_rule tok_rules[] = {
    /* GPT-2, also what ByteLevel does by itself */
    {.regex = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
     .contraction = TOK_EXACT, .spaced = true, .letters = UNI_LETTER, .digits = INT_MAX, .marks = TOK_MARKS,
     .spaces = true},
    /* GPT-4, Llama-3 */
    {.regex = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
              "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     .contraction = TOK_ANY_CASE, .head = TOK_HEAD, .letters = UNI_LETTER, .digits = 3, .marks = TOK_MARKS, .tail = "\r\n",
     .lines = true, .spaces = true},
    /* Qwen2, Qwen2.5, Qwen3 */
    {.regex = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
              "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     .contraction = TOK_ANY_CASE, .head = TOK_HEAD, .letters = UNI_LETTER, .digits = 1, .marks = TOK_MARKS, .tail = "\r\n",
     .lines = true, .spaces = true},
    /* Qwen3.5 */
    {.regex = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}|"
              " ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|"
              "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     .contraction = TOK_ANY_CASE, .head = TOK_HEAD, .letters = UNI_LETTER | UNI_MARK, .digits = 1,
     .marks = TOK_MARKS & ~UNI_MARK, .tail = "\r\n", .lines = true, .spaces = true},
    /* GPT-4o, gpt-oss (o200k) */
    {.regex = "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
              "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
              "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
              "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
              "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     .cased = true, .suffix = true, .head = TOK_HEAD, .digits = 3, .marks = TOK_MARKS, .tail = "\r\n/", .lines = true,
     .spaces = true},
    /* Mistral's Tekken */
    {.regex = "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|"
              "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|"
              "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     .cased = true, .head = TOK_HEAD, .digits = 1, .marks = TOK_MARKS, .tail = "\r\n/", .lines = true, .spaces = true},
    /* DeepSeek-V3 and R1: three patterns in a row */
    {.regex = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
              " ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     .ascii_word = true, .head = ~(UNI_BIT(LINE_END) | UNI_LETTER | UNI_PUNCT | UNI_SYMBOL),
     .letters = UNI_LETTER | UNI_MARK, .marks = UNI_PUNCT | UNI_SYMBOL, .tail = "\r\n", .lines = true, .spaces = true},
    {.regex = "[\xE4\xB8\x80-\xE9\xBE\xA5\xE3\x81\x80-\xE3\x82\x9F\xE3\x82\xA0-\xE3\x83\xBF]+", .cjk = true},
    {.regex = "\\p{N}{1,3}", .digits = 3},
    {.regex = "\\p{N}", .digits = 1},
};
static const tok_rule tok_each_digit = {.digits = 1, .newer = true}, tok_all_digits = {.digits = INT_MAX, .newer = true};

/* Set of the class of the character at p, and its bytes; at the end the empty set. */
static inline uint32_t tok_set(const uni *u, const char *p, const char *end, int *n) {
    if (p == end) return *n = 0, 0;
    return 1u << (u->props[uni_next(p, n)] & 31);
}

static const char *tok_run(const uni *u, const char *p, const char *end, uint32_t set) { /* end of the run of `set` at p */
    for (int n; tok_set(u, p, end, &n) & set;) p += n;
    return p;
}

static bool tok_is_cjk(const char *p, const char *end, int *n) {
    uint32_t c = p < end ? uni_next(p, n) : 0;
    return (c >= 0x4E00 && c <= 0x9FA5) || (c >= 0x3040 && c <= 0x30FF);
}

/* The Digits pre-tokenizer asks Rust, which knows 13 digits more than the patterns do. */
static bool tok_is_number(const uni *u, const tok_rule *r, const char *p, const char *end, int *n) {
    if (tok_set(u, p, end, n) & UNI_NUMBER) return true;
    uint32_t c = r->newer && p < end ? uni_next(p, n) : 0;
    return (c >= 0x11DE0 && c <= 0x11DE9) || (c >= 0x16FF4 && c <= 0x16FF6);
}

/* Bytes of a contraction at p, 0: none. In any case, U+017F is an s too. */
static int tok_contraction(const char *p, const char *end, bool any_case) {
    if (end - p < 2 || *p != '\'') return 0;
    int fold = any_case ? 32 : 0, a = p[1] | fold, b = end - p > 2 ? p[2] | fold : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 3;
    return any_case && end - p > 2 && p[1] == '\xC5' && p[2] == '\xBF' ? 3 : 0;
}

/* head? U* L+ | head? U+ L* with U upper, L lower case, and what has no case in both: as a backtracking matcher finds it.
 * `both` ends behind the last character of the U run that is in L too: where U* ends when no L follows the run. */
static const char *tok_cased(const uni *u, const tok_rule *r, const char *p, const char *end) {
    int n;
    uint32_t s = tok_set(u, p, end, &n);
    const char *from = s & r->head ? p + n : p, *upper_end = NULL;
    for (;; from = p) {
        const char *q = from, *both = NULL;
        for (; (s = tok_set(u, q, end, &n)) & TOK_UPPER; q += n)
            if (s & TOK_LOWER) both = q + n;
        if (s & TOK_LOWER) return tok_run(u, q, end, TOK_LOWER);
        if (both) return both;
        if (!upper_end && q > from) upper_end = q;
        if (from == p) return upper_end;
    }
}

/* Alternative 3, NULL: no word at p. */
static const char *tok_word(const uni *u, const tok_rule *r, const char *p, const char *end, uint32_t s, int n) {
    if (r->cased) {
        const char *q = tok_cased(u, r, p, end);
        return q && r->suffix ? q + tok_contraction(q, end, true) : q;
    }
    if (s & r->letters) return tok_run(u, p + n, end, r->letters);
    int m;
    if ((r->spaced ? *p == ' ' : (s & r->head) != 0) && tok_set(u, p + n, end, &m) & r->letters)
        return tok_run(u, p + n + m, end, r->letters);
    return NULL;
}

/* Alternatives 6 and 7 at white space p, NULL: neither. */
static const char *tok_white(const uni *u, const tok_rule *r, const char *p, const char *end) {
    const char *q = tok_run(u, p, end, UNI_SPACE), *last = q;
    if (r->lines)
        for (const char *k = q; k > p; k--)
            if (k[-1] == '\n' || k[-1] == '\r') return k;
    if (!r->spaces) return NULL;
    if (q == end) return q;
    while (((unsigned char)*--last & 0xC0) == 0x80) continue;
    return last > p ? last : q;
}

/* End of what the pattern matches at p < end, NULL: nothing. `end` is the end of text for the pattern. */
static const char *tok_match(const uni *u, const tok_rule *r, const char *p, const char *end) {
    int n, m;
    const char *q;
    uint32_t s = tok_set(u, p, end, &n);
    if (r->contraction && (m = tok_contraction(p, end, r->contraction == TOK_ANY_CASE))) return p + m;
    if (r->ascii_word && s & (UNI_PUNCT | UNI_SYMBOL) && n == 1) {
        for (q = p + 1; q < end && (unsigned)((*q | 32) - 'a') < 26;) q++;
        if (q > p + 1) return q;
    }
    if ((r->letters || r->cased) && (q = tok_word(u, r, p, end, s, n))) return q;
    if (r->digits) {
        q = r->spaced && *p == ' ' ? p + 1 : p;
        const char *first = q;
        for (int k = 0; k < r->digits && tok_is_number(u, r, q, end, &m); k++) q += m;
        if (q > first) return q;
    }
    if (r->marks) {
        const char *first = *p == ' ' ? p + 1 : p;
        q = tok_run(u, first, end, r->marks);
        if (q > first) {
            while (r->tail && q < end && *q && strchr(r->tail, *q)) q++;
            return q;
        }
    }
    if (s & UNI_SPACE && (r->lines || r->spaces)) return tok_white(u, r, p, end);
    if (!r->cjk) return NULL;
    for (q = p; tok_is_cjk(q, end, &n);) q += n;
    return q > p ? q : NULL;
}

/* ---- What a tokenizer is ---- */

enum {
    TOK_MAX_IDS = 1 << 22,   /* ids a file may use */
    TOK_MAX_CONTENT = 512,   /* bytes of an added token, and of what a normalizer puts in front */
    TOK_MAX_GROWTH = 64,     /* times that replacements may make a text longer */
    TOK_MAX_STEPS = 8,       /* normalizers, patterns or decoders in a row */
    TOK_SHORT = 40,          /* symbols up to which a piece is merged by plain scans */
    TOK_SLOT_BYTES = 24, TOK_SLOT_IDS = 8, TOK_SLOTS = 1 << 14
};

typedef struct tok_merge { /* symbols a b become id; the lowest rank goes first */
    int32_t a, b, id;      /* a -1: empty place of the hash table */
    uint32_t rank;
} tok_merge;

typedef struct tok_index { /* hash table from text to id, open addressing */
    struct tok_place {
        uint32_t hash;
        int32_t id; /* -1: empty */
    } *places;
    uint32_t mask;
    const str *key; /* by id; the tok's own */
} tok_index;

/* The memory of pieces: a direct-mapped table from a piece's bytes to its ids, so that a word is merged once and not each
 * time it comes. One cache line, a seqlock: w[0] = bytes | ids << 8 | TOK_BUSY | change count << 32, then 24 bytes of
 * text, then 8 ids. */
typedef struct tok_slot {
    _Alignas(64) _Atomic uint64_t w[8];
} tok_slot;
#define TOK_BUSY ((uint64_t)1 << 16)

typedef struct tok_added {
    str content;
    int32_t id;
    bool special, normalized, single_word, lstrip, rstrip;
} tok_added;

typedef struct tok_matcher { /* finds the longest of a set of texts at a place */
    struct tok_text {
        str text;
        int added; /* index of t->added */
    } *sorted;
    int n;
    bool first[256]; /* bytes that one of them begins with */
} tok_matcher;

typedef struct tok_normal { /* one normalizer */
    enum { TOK_NFC, TOK_PREPEND, TOK_REPLACE } kind;
    str from, to;
} tok_normal;

typedef struct tok_step { /* one pattern of the pre-tokenizer */
    const tok_rule *rule;
    bool removed; /* what it matches is dropped; else it is a piece, and what lies between is one */
} tok_step;

enum tok_flag { TOK_KNOWN = 1, TOK_SPECIAL = 2, TOK_SKIPPED = 4, TOK_BYTE = 8 }; /* SKIPPED: by TOKA_SKIP_SPECIAL */

struct tok {
    uni uni;
    arena mem;      /* all text below */
    int n_ids, cap; /* ids in use; places in the arrays by id */
    str *key;       /* [cap] what encode matches: for a byte-level tokenizer the bytes themselves. p NULL: nothing */
    str *text;      /* [cap] what decode writes */
    uint8_t *flag;  /* [cap] tok_flag */
    str *name;      /* [cap] content of added tokens and of what the byte-level alphabet cannot say; else p NULL */
    tok_index keys, names;
    tok_merge *merges;
    uint32_t merge_mask;
    uint64_t *joins; /* set of pairs of characters that some merge puts side by side; NULL: not to be cut there */
    uint32_t join_mask;
    tok_slot *slots;

    tok_added *added;
    int32_t *added_at; /* [cap] 1 + index of the id's added token, 0: none */
    int n_added;
    tok_matcher raw, normalized;
    tok_normal normals[TOK_MAX_STEPS];
    int n_normals;
    size_t growth; /* while loading: replacements so far make a text at most so many times longer */
    tok_step steps[TOK_MAX_STEPS];
    int n_steps;
    bool byte_level, prefix_space;
    struct {
        str mark; /* n 0: no Metaspace */
        enum { TOK_NEVER, TOK_FIRST, TOK_ALWAYS } prepend;
        bool split;
    } meta;
    bool ignore_merges, fuse_unk, byte_fallback;
    bool all_bytes; /* byte fallback has a token for each byte: no character is unknown */
    int32_t unk, byte_id[256]; /* -1: none */
    ids head, tail;            /* the post-processor's */

    enum { TOK_JOIN, TOK_BYTES, TOK_CHAIN, TOK_META } decoder;
    bool decode_fallback, decode_fuse;
    int strip; /* of these characters at the start ... */
    str strip_char;
    str meta_mark;
    bool meta_drop; /* the first token loses its marks */
};


/* ---- The two hash tables ---- */

static struct tok_place *tok_place_of(const tok_index *x, str s, uint32_t *hash) { /* where s is or would be */
    uint32_t h = *hash = (uint32_t)hash_bytes(s.p, s.n), i = h & x->mask;
    while (x->places[i].id >= 0 && !(x->places[i].hash == h && str_eq(x->key[x->places[i].id], s))) i = (i + 1) & x->mask;
    return &x->places[i];
}
static int32_t tok_find(const tok_index *x, str s) { /* id or -1 */
    uint32_t hash;
    return tok_place_of(x, s, &hash)->id;
}
static bool tok_index_add(tok_index *x, int32_t id) { /* false: its text is there already */
    uint32_t hash;
    struct tok_place *at = tok_place_of(x, x->key[id], &hash);
    if (at->id >= 0) return false;
    *at = (struct tok_place){hash, id};
    return true;
}
static uint32_t tok_table_mask(size_t n) { /* a power of two at least twice n, less one */
    uint32_t size = 16;
    while (size < 2 * n) size *= 2;
    return size - 1;
}
static void tok_index_init(tok_index *x, const str *key, size_t n) {
    *x = (tok_index){.mask = tok_table_mask(n), .key = key};
    x->places = mem_alloc(((size_t)x->mask + 1) * sizeof *x->places);
    memset(x->places, 0xFF, ((size_t)x->mask + 1) * sizeof *x->places);
}

static tok_merge *tok_merge_place(const tok *t, int32_t a, int32_t b) { /* where the pair is or would be */
    uint64_t h = ((uint64_t)(uint32_t)a << 32 | (uint32_t)b) * 0x9E3779B97F4A7C15u;
    uint32_t i = (uint32_t)(h >> 32) & t->merge_mask;
    while (t->merges[i].a >= 0 && (t->merges[i].a != a || t->merges[i].b != b)) i = (i + 1) & t->merge_mask;
    return &t->merges[i];
}
static uint32_t tok_rank(const tok *t, int32_t a, int32_t b, int32_t *id) { /* UINT32_MAX: a and b do not merge */
    const tok_merge *m = tok_merge_place(t, a, b);
    return *id = m->id, m->rank;
}

static uint64_t *tok_join_place(const tok *t, uint32_t a, uint32_t b) {
    uint64_t key = ((uint64_t)a << 32 | b) + 1;
    uint32_t i = (uint32_t)(key * 0x9E3779B97F4A7C15u >> 32) & t->join_mask;
    while (t->joins[i] && t->joins[i] != key) i = (i + 1) & t->join_mask;
    return &t->joins[i];
}

/* ---- The memory of pieces ---- */

static bool tok_recall(tok_slot *s, const uint64_t key[3], size_t n, ids *out) {
    uint64_t head = atomic_load_explicit(&s->w[0], memory_order_acquire), id[4];
    if ((head & 0xFF) != n || head & TOK_BUSY) return false;
    for (int i = 0; i < 3; i++)
        if (atomic_load_explicit(&s->w[1 + i], memory_order_relaxed) != key[i]) return false;
    for (int i = 0; i < 4; i++) id[i] = atomic_load_explicit(&s->w[4 + i], memory_order_relaxed);
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(&s->w[0], memory_order_relaxed) != head) return false;
    ids_reserve(out, TOK_SLOT_IDS);
    memcpy(out->p + out->n, id, sizeof id);
    out->n += head >> 8 & 0xFF;
    return true;
}

static void tok_remember(tok_slot *s, const uint64_t key[3], size_t n, const int32_t *id, size_t n_id) {
    uint64_t head = atomic_load_explicit(&s->w[0], memory_order_relaxed), packed[4] = {0};
    if (head & TOK_BUSY || !atomic_compare_exchange_strong_explicit(&s->w[0], &head, head | TOK_BUSY, memory_order_acquire,
                                                                    memory_order_relaxed))
        return; /* another thread is writing here */
    atomic_thread_fence(memory_order_release);
    if (n_id) memcpy(packed, id, n_id * sizeof *id);
    for (int i = 0; i < 3; i++) atomic_store_explicit(&s->w[1 + i], key[i], memory_order_relaxed);
    for (int i = 0; i < 4; i++) atomic_store_explicit(&s->w[4 + i], packed[i], memory_order_relaxed);
    head = ((head >> 32) + 1) << 32 | n_id << 8 | n;
    atomic_store_explicit(&s->w[0], head, memory_order_release);
}

/* ---- Byte pair merges ---- */

typedef struct tok_enc { /* one call of tok_encode */
    const tok *t;
    int flags;
    ids *out;
    buf repaired, normal[2], rewritten;
    ids symbols;
} tok_enc;

/* A short piece: the lowest rank is found by scanning. Returns the symbols left. */
static size_t tok_merge_short(const tok *t, int32_t *symbol, size_t n) {
    uint32_t rank[TOK_SHORT];
    int32_t to[TOK_SHORT];
    for (size_t i = 0; i + 1 < n; i++) rank[i] = tok_rank(t, symbol[i], symbol[i + 1], &to[i]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == UINT32_MAX) break;
        symbol[best] = to[best];
        n--;
        for (size_t i = best + 1; i < n; i++) symbol[i] = symbol[i + 1], rank[i - 1] = rank[i], to[i - 1] = to[i];
        if (best + 1 < n) rank[best] = tok_rank(t, symbol[best], symbol[best + 1], &to[best]);
        if (best > 0) rank[best - 1] = tok_rank(t, symbol[best - 1], symbol[best], &to[best - 1]);
    }
    return n;
}

typedef struct tok_heap { /* rank << 32 | place, smallest first */
    uint64_t *p;
    size_t n;
} tok_heap;

static void tok_heap_push(tok_heap *h, uint64_t v) {
    size_t i = h->n++;
    for (; i && h->p[(i - 1) / 2] > v; i = (i - 1) / 2) h->p[i] = h->p[(i - 1) / 2];
    h->p[i] = v;
}
static void tok_heap_sink(tok_heap *h, size_t i) {
    uint64_t v = h->p[i];
    for (size_t k; (k = 2 * i + 1) < h->n; i = k) {
        if (k + 1 < h->n && h->p[k + 1] < h->p[k]) k++;
        if (h->p[k] >= v) break;
        h->p[i] = h->p[k];
    }
    h->p[i] = v;
}
static uint64_t tok_heap_pop(tok_heap *h) {
    uint64_t top = h->p[0];
    h->p[0] = h->p[--h->n];
    if (h->n) tok_heap_sink(h, 0);
    return top;
}

/* A long piece: a list of symbols and a heap of the pairs that merge. An entry of the heap is stale when its pair is gone.
 * At most 3 n entries: n at first, two for each of at most n merges. */
static size_t tok_merge_long(const tok *t, int32_t *symbol, size_t n) {
    uint32_t *prev = mem_alloc(n * sizeof *prev), *next = mem_alloc(n * sizeof *next), rank;
    tok_heap h = {.p = mem_alloc(3 * n * sizeof *h.p)};
    int32_t id;
    for (size_t i = 0; i < n; i++) {
        prev[i] = i ? (uint32_t)i - 1 : UINT32_MAX;
        next[i] = i + 1 < n ? (uint32_t)i + 1 : UINT32_MAX;
        rank = i + 1 < n ? tok_rank(t, symbol[i], symbol[i + 1], &id) : UINT32_MAX;
        if (rank != UINT32_MAX) h.p[h.n++] = (uint64_t)rank << 32 | i;
    }
    for (size_t i = h.n / 2; i--;) tok_heap_sink(&h, i);
    while (h.n) {
        uint64_t top = tok_heap_pop(&h);
        uint32_t at = (uint32_t)top, right;
        if (symbol[at] < 0 || (right = next[at]) == UINT32_MAX) continue;
        if (tok_rank(t, symbol[at], symbol[right], &id) != top >> 32) continue;
        symbol[at] = id;
        symbol[right] = -1;
        if ((next[at] = next[right]) != UINT32_MAX) {
            prev[next[at]] = at;
            if ((rank = tok_rank(t, id, symbol[next[at]], &id)) != UINT32_MAX) tok_heap_push(&h, (uint64_t)rank << 32 | at);
        }
        if (prev[at] != UINT32_MAX && (rank = tok_rank(t, symbol[prev[at]], symbol[at], &id)) != UINT32_MAX)
            tok_heap_push(&h, (uint64_t)rank << 32 | prev[at]);
    }
    size_t left = 0;
    for (size_t i = 0; i < n; i++)
        if (symbol[i] >= 0) symbol[left++] = symbol[i];
    free(prev), free(next), free(h.p);
    return left;
}

/* The symbols a piece starts from: its bytes or its characters. One that is not in the vocabulary becomes its bytes'
 * tokens if there is one for each, else the unknown token (several in a row one, if fused), else nothing. */
static void tok_symbols(tok_enc *x, str s) {
    const tok *t = x->t;
    bool unk = false;
    x->symbols.n = 0;
    ids_reserve(&x->symbols, s.n + 1);
    for (size_t i = 0, n; i < s.n; i += n) {
        int len = 1;
        if (!t->byte_level) uni_next(s.p + i, &len);
        n = (size_t)len;
        int32_t id = t->byte_level ? t->byte_id[(unsigned char)s.p[i]] : tok_find(&t->keys, (str){s.p + i, n});
        bool bytes = id < 0 && t->byte_fallback;
        for (size_t k = 0; bytes && k < n; k++) bytes = t->byte_id[(unsigned char)s.p[i + k]] >= 0;
        if (bytes) {
            for (size_t k = 0; k < n; k++) ids_push(&x->symbols, t->byte_id[(unsigned char)s.p[i + k]]);
        } else if (id >= 0) {
            if (unk) ids_push(&x->symbols, t->unk);
            unk = false;
            ids_push(&x->symbols, id);
        } else if (t->unk >= 0) {
            if (unk && !t->fuse_unk) ids_push(&x->symbols, t->unk);
            unk = true;
        }
    }
    if (unk) ids_push(&x->symbols, t->unk);
}

/* One piece to ids. */
static void tok_piece(tok_enc *x, str s) {
    const tok *t = x->t;
    uint64_t key[3] = {0};
    tok_slot *slot = NULL;
    size_t before = x->out->n;
    int32_t id;
    if (s.n <= TOK_SLOT_BYTES) {
        memcpy(key, s.p, s.n);
        uint64_t h = (key[0] * 0x9E3779B97F4A7C15u ^ key[1]) * 0xC2B2AE3D27D4EB4Fu ^ key[2] * 0x165667B19E3779F9u;
        slot = &t->slots[(h ^ h >> 29) * 0x9E3779B97F4A7C15u >> 50]; /* 64 - 50 = log2(TOK_SLOTS) */
        if (tok_recall(slot, key, s.n, x->out)) return;
    }
    if (t->ignore_merges && (id = tok_find(&t->keys, s)) >= 0) {
        ids_push(x->out, id);
    } else {
        tok_symbols(x, s);
        size_t n = x->symbols.n;
        n = n <= TOK_SHORT ? tok_merge_short(t, x->symbols.p, n) : tok_merge_long(t, x->symbols.p, n);
        ids_reserve(x->out, n);
        if (n) memcpy(x->out->p + x->out->n, x->symbols.p, n * sizeof *x->symbols.p);
        x->out->n += n;
    }
    size_t n = x->out->n - before;
    if (slot && n && n <= TOK_SLOT_IDS) tok_remember(slot, key, s.n, x->out->p + before, n);
}

/* ---- From text to pieces ---- */

/* A tokenizer on characters has no pattern: its piece is a whole text. No merge crosses a place between two characters
 * that no merge puts side by side, so it is cut there, which changes nothing but lets words be remembered. An unknown
 * character must not be cut from the one before it, for the two may be fused. */
static void tok_characters(tok_enc *x, str s) {
    const tok *t = x->t;
    const char *start = s.p, *end = s.p + s.n;
    uint32_t before = 0;
    int n;
    for (const char *p = s.p; t->joins && p < end; p += n) {
        uint32_t c = uni_next(p, &n);
        if (p > start && !*tok_join_place(t, before, c) && (t->all_bytes || tok_find(&t->keys, (str){p, (size_t)n}) >= 0)) {
            tok_piece(x, (str){start, (size_t)(p - start)});
            start = p;
        }
        before = c;
    }
    if (start < end) tok_piece(x, (str){start, (size_t)(end - start)});
}

/* Pieces of s by the patterns from `step` on. */
static void tok_cut(tok_enc *x, int step, str s) {
    const tok *t = x->t;
    if (step == t->n_steps) {
        if (t->byte_level) tok_piece(x, s);
        else tok_characters(x, s);
        return;
    }
    const tok_rule *r = t->steps[step].rule;
    const char *between = s.p, *p = s.p, *end = s.p + s.n, *q;
    while (p < end) {
        int n;
        if (r->digits && !r->marks) /* only digits match: skip what is none */
            p = tok_run(&t->uni, p, end, ~(UNI_NUMBER | UNI_BIT(CN)));
        q = p < end ? tok_match(&t->uni, r, p, end) : p;
        if (!q) {
            uni_next(p, &n);
            p += n;
            continue;
        }
        if (between < p) tok_cut(x, step + 1, (str){between, (size_t)(p - between)});
        if (p < q && !t->steps[step].removed) tok_cut(x, step + 1, (str){p, (size_t)(q - p)});
        between = p = q;
    }
    if (between < end) tok_cut(x, step + 1, (str){between, (size_t)(end - between)});
}

/* Every `from` in s becomes `to`; s itself where there is none. */
static str tok_replace(str s, str from, str to, buf *b) {
    size_t done = 0;
    ptrdiff_t at = str_find(s, from, 0);
    if (at < 0) return s;
    buf_clear(b);
    for (; at >= 0; at = str_find(s, from, done)) {
        buf_put(b, s.p + done, (size_t)at - done);
        buf_str(b, to);
        done = (size_t)at + from.n;
    }
    buf_put(b, s.p + done, s.n - done);
    return buf_view(b);
}

static str tok_prepend(str s, str head, buf *b) {
    buf_clear(b);
    buf_str(b, head);
    buf_str(b, s);
    return buf_view(b);
}

/* The normalizers in their order, in turn into one of two buffers and from the other. */
static str tok_normalize(const tok *t, str s, buf b[2]) {
    for (int i = 0; i < t->n_normals; i++) {
        const tok_normal *k = &t->normals[i];
        buf *to = s.p == b[0].p ? &b[1] : &b[0];
        if (k->kind == TOK_NFC) s = uni_nfc(&t->uni, s, UNI_9, to);
        else if (k->kind == TOK_REPLACE) s = tok_replace(s, k->from, k->to, to);
        else if (s.n) s = tok_prepend(s, k->to, to);
    }
    return s;
}

/* A stretch of normalized text without added tokens. first: it begins where the whole text begins. */
static void tok_stretch(tok_enc *x, str s, bool first) {
    const tok *t = x->t;
    if (t->prefix_space && *s.p != ' ') s = tok_prepend(s, STR(" "), &x->rewritten);
    if (t->meta.mark.n) {
        bool prepend = t->meta.prepend == TOK_ALWAYS || (t->meta.prepend == TOK_FIRST && first);
        const buf *first_buf = &x->normal[0]; /* s may lie in it; then the other one is free */
        bool inside = first_buf->p && s.p >= first_buf->p && s.p < first_buf->p + first_buf->cap;
        buf *spare = &x->normal[inside];
        s = tok_replace(s, STR(" "), t->meta.mark, spare);
        if (prepend && !str_starts(s, t->meta.mark)) s = tok_prepend(s, t->meta.mark, &x->rewritten);
    }
    for (ptrdiff_t next; t->meta.split && (next = str_find(s, t->meta.mark, 1)) > 0; s = str_sub(s, (size_t)next, s.n))
        tok_cut(x, 0, str_sub(s, 0, (size_t)next)); /* each mark begins a piece */
    tok_cut(x, 0, s);
}

/* ---- Added tokens ---- */

/* The longest text of m that s begins with, or NULL. The sorted texts that agree with its first d bytes are [lo,hi). */
static const struct tok_text *tok_longest(const tok_matcher *m, str s) {
    const struct tok_text *found = NULL;
    int lo = 0, hi = m->n;
    for (size_t d = 0; lo < hi; d++) {
        while (lo < hi && m->sorted[lo].text.n == d) found = &m->sorted[lo++];
        if (d == s.n) break;
        int c = (unsigned char)s.p[d];
        for (int side = 0; side < 2; side++) { /* the first with a byte >= c, then the first with a byte > c */
            int a = lo, b = hi;
            while (a < b) {
                int mid = (a + b) / 2;
                if ((unsigned char)m->sorted[mid].text.p[d] < c + side) a = mid + 1;
                else b = mid;
            }
            if (side) hi = a;
            else lo = a;
        }
    }
    return found;
}

/* \w of Rust's regex: alphabetic characters, marks, decimal digits, connectors, joiners. */
static bool tok_is_word(const uni *u, const char *p) {
    int n;
    uint32_t c = uni_next(p, &n), s = 1u << (u->props[c] & 31);
    return s & (UNI_LETTER | UNI_MARK | UNI_BIT(ND) | UNI_BIT(NL) | UNI_BIT(PC)) || c == 0x200C || c == 0x200D ||
           (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
           (c >= 0x1F170 && c <= 0x1F189);
}
static const char *tok_back(const char *p) { /* start of the character before p */
    while (((unsigned char)*--p & 0xC0) == 0x80) continue;
    return p;
}

/* Cuts s at added tokens: first at those that match the text as it is, then, in what lies between and is normalized, at the
 * others. Without TOKA_PARSE_SPECIAL a special token's text is passed over, with what might match inside it, as HF does.
 * `done` is the end of what became ids; the search goes on at p, before it if a token took the space behind it. */
static void tok_added_cut(tok_enc *x, bool normalized, str s, bool first) {
    const tok *t = x->t;
    const tok_matcher *m = normalized ? &t->normalized : &t->raw;
    if (normalized) s = tok_normalize(t, s, x->normal);
    const char *p = s.p, *end = s.p + s.n, *done = s.p;
    for (;;) {
        const struct tok_text *hit = NULL;
        while (p < end && !(m->first[(unsigned char)*p] && (hit = tok_longest(m, (str){p, (size_t)(end - p)})))) p++;
        const tok_added *a = hit ? &t->added[hit->added] : NULL;
        const char *from = p, *to = end;
        if (a) {
            int n;
            p += hit->text.n;
            if (a->special && !(x->flags & TOKA_PARSE_SPECIAL)) continue;
            if (a->single_word && from > s.p && tok_is_word(&t->uni, tok_back(from))) continue;
            if (a->single_word && p < end && tok_is_word(&t->uni, p)) continue;
            while (a->lstrip && from > done && tok_set(&t->uni, tok_back(from), end, &n) & UNI_SPACE) from = tok_back(from);
            if (a->lstrip) from = MAX(from, done);
            to = a->rstrip ? tok_run(&t->uni, p, end, UNI_SPACE) : p;
        }
        if (done < from) {
            str between = {done, (size_t)(from - done)};
            if (normalized) tok_stretch(x, between, first && done == s.p);
            else tok_added_cut(x, true, between, first && done == s.p);
        }
        if (!a) break;
        if (from < to) ids_push(x->out, a->id); /* else the token before took all of it */
        done = to;
    }
}

/* ---- Encode and decode ---- */

/* Text to ids, appended to out. flags: TOKA_ADD_SPECIAL, TOKA_PARSE_SPECIAL. */
static int tok_encode(const tok *t, str text, int flags, ids *out, toka_err *e) {
    tok_enc x = {.t = t, .flags = flags, .out = out};
    bool add = flags & TOKA_ADD_SPECIAL;
    if (text.n > INT32_MAX) return fail(e, TOKA_E_USE, "text of %zu bytes: at most %d are taken", text.n, INT32_MAX);
    for (size_t i = 0; add && i < t->head.n; i++) ids_push(out, t->head.p[i]);
    if (text.n) tok_added_cut(&x, false, uni_repair(text, &x.repaired), true);
    for (size_t i = 0; add && i < t->tail.n; i++) ids_push(out, t->tail.p[i]);
    buf_free(&x.repaired), buf_free(&x.normal[0]), buf_free(&x.normal[1]), buf_free(&x.rewritten);
    ids_free(&x.symbols);
    return 0;
}

/* Streaming detokenizer. Held back is what later ids may still change: on bytes the unfinished last character; with byte
 * fallback the whole run of byte tokens, because one bad byte makes HF write U+FFFD for each byte of the run. */
typedef struct tok_stream {
    const tok *t;
    int flags;  /* TOKA_SKIP_SPECIAL */
    int strip;  /* characters that may still be taken off the start */
    bool begun; /* a token was put */
    buf held;
} tok_stream;

static void tok_stream_init(tok_stream *s, const tok *t, int flags) {
    *s = (tok_stream){.t = t, .flags = flags, .strip = t->strip};
}
static void tok_stream_free(tok_stream *s) { buf_free(&s->held); }

/* Writes whole text, without what is to be stripped off the start. */
static void tok_stream_emit(tok_stream *s, str text, buf *out) {
    while (s->strip && text.n) {
        bool is = str_starts(text, s->t->strip_char);
        if (is) text = str_sub(text, s->t->strip_char.n, text.n);
        s->strip = is ? s->strip - 1 : 0;
    }
    buf_str(out, text);
}

/* Bytes to text: whole characters, U+FFFD for what can be none. What could still become one stays, unless `all`. */
static void tok_stream_bytes(tok_stream *s, bool all, buf *out) {
    const char *p = s->held.p, *end = p + s->held.n;
    bool cut = false;
    while (p < end) {
        int n = utf8_len(p, end);
        if (n) {
            buf_put(out, p, (size_t)n);
        } else {
            n = uni_bad_len(p, end, &cut);
            if (cut && !all) break;
            buf_c(out, "\xEF\xBF\xBD");
        }
        p += n;
    }
    size_t left = (size_t)(end - p);
    memmove(s->held.p, p, left);
    s->held.n = left;
}

/* The end of a run of byte tokens: text if all of it is valid, else U+FFFD for each byte. */
static void tok_stream_run(tok_stream *s, buf *out) {
    size_t i = 0, n = s->held.n, k;
    while (i < n && (k = (size_t)utf8_len(s->held.p + i, s->held.p + n)) > 0) i += k;
    if (i == n) tok_stream_emit(s, buf_view(&s->held), out);
    for (k = 0; i < n && k < n; k++) tok_stream_emit(s, STR("\xEF\xBF\xBD"), out);
    s->held.n = 0;
}

/* One token's text where marks are spaces, and none at the very start. */
static void tok_stream_meta(tok_stream *s, str text, buf *out) {
    str mark = s->t->meta_mark;
    while (text.n) {
        ptrdiff_t at = str_find(text, mark, 0);
        buf_put(out, text.p, at < 0 ? text.n : (size_t)at);
        if (at < 0) break;
        if (s->begun || !s->t->meta_drop) buf_char(out, ' ');
        text = str_sub(text, (size_t)at + mark.n, text.n);
    }
}

/* Takes one id and appends the text that became certain. An id that the vocabulary does not have is nothing. */
static void tok_stream_put(tok_stream *s, int32_t id, buf *out) {
    const tok *t = s->t;
    if (id < 0 || id >= t->n_ids || !(t->flag[id] & TOK_KNOWN)) return;
    if (s->flags & TOKA_SKIP_SPECIAL && t->flag[id] & TOK_SKIPPED) return;
    if (t->decoder == TOK_BYTES) {
        buf_str(&s->held, t->text[id]);
        if (s->held.n) tok_stream_bytes(s, false, out);
    } else if (t->decoder == TOK_CHAIN) {
        if (t->flag[id] & TOK_BYTE) {
            buf_str(&s->held, t->text[id]);
        } else {
            if (s->held.n) tok_stream_run(s, out);
            tok_stream_emit(s, t->text[id], out);
        }
    } else if (t->decoder == TOK_META) {
        tok_stream_meta(s, t->text[id], out);
    } else {
        if (s->begun) buf_char(out, ' ');
        buf_str(out, t->text[id]);
    }
    s->begun = true;
}

/* The text goes on behind token id (-1: any), whose own text was shown elsewhere: what decoders take off the beginning of a text,
 * a space, stays on. A special token leaves the beginning where it is. */
static void tok_stream_follow(tok_stream *s, int32_t id) {
    if (id >= 0 && id < s->t->n_ids && s->t->flag[id] & TOK_SPECIAL) return;
    s->begun = true;
    s->strip = 0;
}

/* No more ids: an unfinished character becomes U+FFFD. */
static void tok_stream_end(tok_stream *s, buf *out) {
    if (s->held.n && s->t->decoder == TOK_BYTES) tok_stream_bytes(s, true, out);
    if (s->held.n) tok_stream_run(s, out);
}

/* Ids to text, appended to out. flags: TOKA_SKIP_SPECIAL. */
static int tok_decode(const tok *t, const int32_t *id, size_t n, int flags, buf *out, toka_err *e) {
    tok_stream s;
    for (size_t i = 0; i < n; i++)
        if (id[i] < 0 || id[i] >= t->n_ids)
            return fail(e, TOKA_E_USE, "token %zu of %zu: id %d, but the vocabulary ends at %d", i, n, id[i], t->n_ids - 1);
    tok_stream_init(&s, t, flags);
    for (size_t i = 0; i < n; i++) tok_stream_put(&s, id[i], out);
    tok_stream_end(&s, out);
    tok_stream_free(&s);
    return 0;
}

/* The bytes that an id adds in the middle of a text, maybe part of a character. An id that the vocabulary does not have: none. */
static void tok_bytes(const tok *t, int32_t id, buf *out) {
    tok_stream s = {.t = t, .begun = true};
    if (id < 0 || id >= t->n_ids || !(t->flag[id] & TOK_KNOWN)) return;
    if (t->decoder == TOK_JOIN) buf_char(out, ' ');
    if (t->decoder == TOK_META) tok_stream_meta(&s, t->text[id], out);
    else buf_str(out, t->text[id]);
}

/* ---- Loading: vocabulary and merges ---- */

/* The byte that a character of the byte-level alphabet stands for, -1: it is not in it. Printable characters of Latin-1
 * stand for themselves, the 68 other bytes are U+0100 .. U+0143 in their order. */
static int tok_byte_of(uint32_t c) {
    if ((c >= 0x21 && c <= 0x7E) || (c >= 0xA1 && c <= 0xFF && c != 0xAD)) return (int)c;
    if (c >= 0x100 && c <= 0x120) return (int)c - 0x100;
    if (c >= 0x121 && c <= 0x142) return (int)c - 0x121 + 0x7F;
    return c == 0x143 ? 0xAD : -1;
}

/* Appends the bytes that byte-level text stands for; false: a character of it is not in the alphabet. */
static bool tok_unmap(str s, buf *out) {
    for (int n; s.n; s = str_sub(s, (size_t)n, s.n)) {
        int byte = tok_byte_of(uni_next(s.p, &n));
        if (byte < 0) return false;
        buf_char(out, (char)byte);
    }
    return true;
}

/* model.vocab: every id is a number within limits. *largest: of them (-1 before), *bytes: all contents together. */
static int tok_check_vocab(const json *vocab, int64_t *largest, size_t *bytes, toka_err *e) {
    if (!json_is(vocab, JSON_OBJECT)) return TOK_FAIL("model.vocab: an object was expected");
    int64_t end = MIN((int64_t)TOK_MAX_IDS, 65536 + 4 * (int64_t)vocab->n); /* gaps, but no table of gaps alone */
    JSON_MEMBERS(key, vocab) {
        int64_t id = json_int(key + 1, -1);
        if (id < 0 || id >= end)
            return TOK_FAIL("model.vocab: the id of \"%.*s\" is no number from 0 to %d", STRF(json_str(key)), (int)end - 1);
        *largest = MAX(*largest, id);
        *bytes += key->n;
    }
    return 0;
}

static int tok_load_vocab(tok *t, const json *vocab, const json *added, toka_err *e) {
    int64_t largest = -1;
    size_t bytes = 0;
    if (tok_check_vocab(vocab, &largest, &bytes, e)) return e->code;
    t->n_ids = (int)largest + 1;
    t->cap = MAX(t->n_ids, (int)vocab->n) + (added ? (int)added->n : 0);
    t->key = mem_zalloc((size_t)t->cap * sizeof *t->key);
    t->name = mem_zalloc((size_t)t->cap * sizeof *t->name);
    t->text = mem_zalloc((size_t)t->cap * sizeof *t->text);
    t->flag = mem_zalloc((size_t)t->cap);
    tok_index_init(&t->keys, t->key, vocab->n);
    tok_index_init(&t->names, t->name, vocab->n + (added ? added->n : 0));
    buf raw = {.p = arena_alloc(&t->mem, bytes + 64), .cap = bytes + 64}; /* never grows: unmapped text is shorter */
    JSON_MEMBERS(key, vocab) {
        int32_t id = (int32_t)json_int(key + 1, -1);
        size_t from = raw.n;
        if (t->flag[id]) return TOK_FAIL("model.vocab: id %d stands there twice", id);
        t->flag[id] = TOK_KNOWN;
        bool mapped = !t->byte_level || tok_unmap(json_str(key), &raw);
        if (!mapped) raw.n = from;
        if (!mapped || !t->byte_level) buf_str(&raw, json_str(key));
        t->text[id] = (str){raw.p + from, raw.n - from};
        (mapped ? t->key : t->name)[id] = t->text[id];
        if (!tok_index_add(mapped ? &t->keys : &t->names, id))
            return TOK_FAIL("model.vocab: \"%.*s\" stands there twice", STRF(json_str(key)));
    }
    return 0;
}

/* Id of a token's exact content, added tokens first; -1: none. */
static int32_t tok_id(const tok *t, str content) {
    int32_t id = tok_find(&t->names, content);
    if (id >= 0 || !t->byte_level) return id >= 0 ? id : tok_find(&t->keys, content);
    buf raw = {0};
    if (tok_unmap(content, &raw)) id = tok_find(&t->keys, buf_view(&raw));
    buf_free(&raw);
    return id;
}

/* byte_id, with byte fallback the ids of <0x00> .. <0xFF>, else those of the bytes themselves; and the unknown token. */
static int tok_load_bytes(tok *t, const json *model, toka_err *e) {
    str unk = json_str(json_get(model, "unk_token"));
    t->unk = json_is(json_get(model, "unk_token"), JSON_STRING) ? tok_id(t, unk) : -1;
    if (t->unk < 0 && json_is(json_get(model, "unk_token"), JSON_STRING))
        return TOK_FAIL("model.unk_token \"%.*s\" is not in the vocabulary", STRF(unk));
    t->all_bytes = t->byte_fallback;
    for (int b = 0; b < 256; b++) {
        char z[8] = {(char)b};
        size_t n = 1;
        if (!t->byte_level) n = (size_t)snprintf(z, sizeof z, "<0x%02X>", (unsigned)b);
        t->byte_id[b] = tok_find(&t->keys, (str){z, n});
        t->all_bytes = t->all_bytes && t->byte_id[b] >= 0;
        if (t->byte_fallback && t->byte_level && t->byte_id[b] < 0)
            return TOK_FAIL("model.byte_fallback with a ByteLevel pre-tokenizer is not supported");
    }
    return 0;
}

/* Where a merge written as "a b" is cut: at its one space; if there are more, where both parts and the whole are known. */
static size_t tok_merge_cut(const tok *t, str s) {
    const char *at = memchr(s.p, ' ', s.n);
    if (!at || !memchr(at + 1, ' ', s.n - (size_t)(at + 1 - s.p))) return at ? (size_t)(at - s.p) : SIZE_MAX;
    buf whole = {0};
    size_t found = SIZE_MAX;
    for (size_t i = 1; i + 1 < s.n && i < TOK_MAX_CONTENT && found == SIZE_MAX; i++) {
        if (s.p[i] != ' ') continue;
        buf_clear(&whole);
        buf_put(&whole, s.p, i);
        buf_put(&whole, s.p + i + 1, s.n - i - 1);
        str part[3] = {str_sub(s, 0, i), str_sub(s, i + 1, s.n), buf_view(&whole)};
        int known = 0;
        while (known < 3 && tok_find(&t->keys, part[known]) >= 0) known++;
        if (known == 3) found = i;
    }
    buf_free(&whole);
    return found;
}

/* The two parts of a merge, ["a","b"] or "a b", one behind the other in *both as keys; *cut is where b begins. */
static int tok_merge_parts(const tok *t, const json *m, uint32_t rank, buf *both, size_t *cut, toka_err *e) {
    const json *first = json_at(m, 0), *second = json_at(m, 1);
    str a = json_str(first), b = json_str(second), line = json_str(m);
    bool pair = first && m->n == 2 && json_is(first, JSON_STRING) && json_is(second, JSON_STRING);
    if (!pair && !json_is(m, JSON_STRING))
        return TOK_FAIL("model.merges[%u]: \"a b\" or [\"a\",\"b\"] was expected", rank);
    if (!pair) {
        size_t at = tok_merge_cut(t, line);
        if (at == SIZE_MAX)
            return TOK_FAIL("model.merges[%u]: \"%.*s\" is not two tokens", rank, STRF(line));
        a = str_sub(line, 0, at), b = str_sub(line, at + 1, line.n);
    }
    buf_clear(both);
    bool known = t->byte_level ? tok_unmap(a, both) : (buf_str(both, a), true);
    *cut = both->n;
    known = known && (t->byte_level ? tok_unmap(b, both) : (buf_str(both, b), true));
    if (!known) return TOK_FAIL("model.merges[%u]: a part is not in the vocabulary", rank);
    return 0;
}

static bool tok_is_byte_id(const tok *t, int32_t id) {
    for (int b = 0; b < 256; b++)
        if (t->byte_id[b] == id) return true;
    return false;
}

/* Notes that the merge a b puts the last character of a before the first of b. */
static void tok_add_join(tok *t, int32_t a, int32_t b) {
    int n;
    str s = t->key[a];
    uint32_t last = s.n ? uni_next(tok_back(s.p + s.n), &n) : 0, first = t->key[b].n ? uni_next(t->key[b].p, &n) : 0;
    *tok_join_place(t, last, first) = ((uint64_t)last << 32 | first) + 1;
}

static int tok_load_merges(tok *t, const json *merges, toka_err *e) {
    if (!json_is(merges, JSON_ARRAY)) return TOK_FAIL("model.merges: an array was expected");
    t->merge_mask = tok_table_mask(merges->n);
    t->merges = mem_alloc(((size_t)t->merge_mask + 1) * sizeof *t->merges);
    memset(t->merges, 0xFF, ((size_t)t->merge_mask + 1) * sizeof *t->merges);
    bool joins = !t->byte_level && !t->ignore_merges && (t->all_bytes || t->unk >= 0); /* else characters may vanish */
    t->join_mask = t->merge_mask;
    if (joins) t->joins = mem_zalloc(((size_t)t->join_mask + 1) * sizeof *t->joins);
    uint32_t rank = 0;
    buf both = {0};
    JSON_EACH(m, merges) {
        size_t cut = 0;
        if (tok_merge_parts(t, m, rank, &both, &cut, e)) break;
        str ab = buf_view(&both);
        int32_t a = tok_find(&t->keys, str_sub(ab, 0, cut)), b = tok_find(&t->keys, str_sub(ab, cut, ab.n));
        int32_t id = tok_find(&t->keys, ab);
        if (a < 0 || b < 0 || id < 0) {
            TOK_FAIL("model.merges[%u]: %s is not in the vocabulary", rank,
                 a < 0 ? "the first token" : b < 0 ? "the second token" : "what it makes");
            break;
        }
        *tok_merge_place(t, a, b) = (tok_merge){a, b, id, rank++};
        if (joins) tok_add_join(t, a, b);
        joins = joins && a != t->unk && b != t->unk && !tok_is_byte_id(t, a) && !tok_is_byte_id(t, b);
    }
    buf_free(&both);
    if (rank < merges->n) return e->code;
    if (!joins) free(t->joins), t->joins = NULL; /* such merges join what is not seen in the text: cut nowhere */
    return 0;
}

/* ---- Loading: added tokens ---- */

static int tok_by_text(const void *a, const void *b) {
    const struct tok_text *x = a, *y = b;
    int c = memcmp(x->text.p, y->text.p, MIN(x->text.n, y->text.n));
    return c ? c : x->text.n != y->text.n ? (x->text.n < y->text.n ? -1 : 1) : x->added - y->added;
}

static void tok_load_matcher(tok *t, tok_matcher *m, bool normalized) {
    buf b[2] = {{0}, {0}};
    m->sorted = mem_alloc((size_t)t->n_added * sizeof *m->sorted);
    for (int i = 0; i < t->n_added; i++) {
        const tok_added *a = &t->added[i];
        if (a->normalized != normalized) continue;
        str text = normalized ? arena_str(&t->mem, tok_normalize(t, a->content, b)) : a->content;
        t->text[a->id] = text;
        if (str_eq(text, a->content) && a->special) t->flag[a->id] |= TOK_SKIPPED; /* HF looks for the changed text */
        if (!text.n) continue;
        m->first[(unsigned char)*text.p] = true;
        m->sorted[m->n++] = (struct tok_text){text, i};
    }
    qsort(m->sorted, (size_t)m->n, sizeof *m->sorted, tok_by_text);
    buf_free(&b[0]), buf_free(&b[1]);
}

/* added_tokens. An id is what the vocabulary or an earlier entry says, else the next one free: HF does not look at "id". */
static int tok_load_added(tok *t, const json *list, size_t n_vocab, toka_err *e) {
    int32_t next = (int32_t)n_vocab;
    bool there = json_is(list, JSON_ARRAY);
    if (list && !there && !json_is(list, JSON_NULL))
        return TOK_FAIL("added_tokens: an array was expected");
    t->added = mem_alloc((there ? list->n : 0) * sizeof *t->added);
    t->added_at = mem_zalloc((size_t)t->cap * sizeof *t->added_at);
    if (there) JSON_EACH(it, list) {
            str content = json_str(json_get(it, "content"));
            if (!json_is(json_get(it, "content"), JSON_STRING))
                return TOK_FAIL("added_tokens[%d]: no content", t->n_added);
            if (!content.n) continue;
            if (content.n > TOK_MAX_CONTENT)
                return TOK_FAIL("added_tokens[%d]: %zu bytes, at most %d", t->n_added, content.n, TOK_MAX_CONTENT);
            tok_added a = {.content = arena_str(&t->mem, content), .id = tok_id(t, content)};
            if (a.id < 0) a.id = next++;
            a.special = json_true(json_get(it, "special")), a.normalized = json_true(json_get(it, "normalized"));
            a.single_word = json_true(json_get(it, "single_word"));
            a.lstrip = json_true(json_get(it, "lstrip")), a.rstrip = json_true(json_get(it, "rstrip"));
            if (!t->added_at[a.id]) t->added_at[a.id] = ++t->n_added;
            t->added[t->added_at[a.id] - 1] = a;
            t->name[a.id] = a.content;
            tok_index_add(&t->names, a.id);
            t->n_ids = MAX(t->n_ids, a.id + 1);
            t->flag[a.id] = (uint8_t)(TOK_KNOWN | (a.special ? TOK_SPECIAL : 0));
        }
    tok_load_matcher(t, &t->raw, false);
    tok_load_matcher(t, &t->normalized, true);
    return 0;
}

/* ---- Loading: what stands around the model ---- */

static str tok_type(const json *v) { return json_str(json_get(v, "type")); }
static int tok_unsupported(toka_err *e, const char *where, str what) {
    return TOK_FAIL("%s \"%.*s\" is not supported", where, STRF(what));
}

/* The members of a Sequence one after the other, anything else alone; null is nothing. `one` gets each. Depth and count are
 * bounded, for each may cost a pass over the vocabulary. */
typedef int tok_load_fn(tok *t, const json *v, toka_err *e);
static int tok_load_each(tok *t, const json *v, const char *list, int depth, tok_load_fn *one, toka_err *e) {
    if (!v || json_is(v, JSON_NULL)) return 0;
    if (!str_is(tok_type(v), "Sequence")) return one(t, v, e);
    const json *items = json_get(v, list);
    if (!json_is(items, JSON_ARRAY)) return TOK_FAIL("a Sequence without %s", list);
    if (depth > 1 || items->n > TOK_MAX_STEPS) return TOK_FAIL("a Sequence of more than %d %s", TOK_MAX_STEPS, list);
    JSON_EACH(it, items) if (tok_load_each(t, it, list, depth + 1, one, e)) return e->code;
    return 0;
}

static str tok_keep(tok *t, str s) { return arena_str(&t->mem, s); }

/* {"String": s}, or {"Regex": s} where s says only itself. n 0: it is something else. */
static str tok_literal(const json *pattern) {
    str s = json_str(json_get(pattern, "String")), r = json_str(json_get(pattern, "Regex"));
    for (size_t i = 0; i < r.n; i++)
        if (strchr("\\^$.|?*+()[]{}", r.p[i])) return STR("");
    return s.n ? s : r;
}

/* Counts one more replacement in; true: together they may make a text too long. */
static bool tok_grows(tok *t, str from, str to) {
    t->growth *= MAX((size_t)1, (to.n + from.n - 1) / from.n);
    return t->growth > TOK_MAX_GROWTH;
}

static int tok_load_normal(tok *t, const json *v, toka_err *e) {
    str type = tok_type(v);
    if (t->n_normals == TOK_MAX_STEPS) return TOK_FAIL("more than %d normalizers", TOK_MAX_STEPS);
    tok_normal *k = &t->normals[t->n_normals++];
    if (str_is(type, "NFC")) {
        k->kind = TOK_NFC;
    } else if (str_is(type, "Prepend")) {
        *k = (tok_normal){TOK_PREPEND, STR(""), tok_keep(t, json_str(json_get(v, "prepend")))};
    } else if (str_is(type, "Replace")) {
        const json *pattern = json_get(v, "pattern");
        *k = (tok_normal){TOK_REPLACE, tok_keep(t, tok_literal(pattern)), tok_keep(t, json_str(json_get(v, "content")))};
        if (!k->from.n) return tok_unsupported(e, "normalizer Replace: the pattern", json_str(json_get(pattern, "Regex")));
        if (tok_grows(t, k->from, k->to)) return TOK_FAIL("normalizers make a text over %d times longer", TOK_MAX_GROWTH);
    } else {
        return tok_unsupported(e, "normalizer", type);
    }
    if (k->to.n > TOK_MAX_CONTENT) return tok_unsupported(e, "normalizer: the content", k->to);
    return 0;
}

static int tok_add_step(tok *t, const tok_rule *rule, bool removed, toka_err *e) {
    if (t->n_steps == TOK_MAX_STEPS) return TOK_FAIL("more than %d pre-tokenizers", TOK_MAX_STEPS);
    t->steps[t->n_steps++] = (tok_step){rule, removed};
    return 0;
}

static int tok_load_split(tok *t, const json *v, toka_err *e) {
    const json *pattern = json_get(v, "pattern");
    str regex = json_str(json_get(pattern, "Regex")), behavior = json_str(json_get(v, "behavior"));
    if (json_true(json_get(v, "invert"))) return tok_unsupported(e, "pre_tokenizer Split: invert with the pattern", regex);
    if (!str_is(behavior, "Isolated") && !str_is(behavior, "Removed"))
        return tok_unsupported(e, "pre_tokenizer Split: the behavior", behavior);
    for (int i = 0; i < COUNT(tok_rules); i++)
        if (json_is(json_get(pattern, "Regex"), JSON_STRING) && str_is(regex, tok_rules[i].regex))
            return tok_add_step(t, &tok_rules[i], str_is(behavior, "Removed"), e);
    return tok_unsupported(e, "pre_tokenizer Split: the pattern", regex.n ? regex : json_str(json_get(pattern, "String")));
}

static int tok_load_metaspace(tok *t, const json *v, toka_err *e) {
    const json *scheme = json_get(v, "prepend_scheme"), *prefix = json_get(v, "add_prefix_space");
    const json *split = json_get(v, "split");
    str s = scheme ? json_str(scheme) : STR("always");
    t->meta.mark = tok_keep(t, json_str(json_get(v, "replacement")));
    t->meta.split = !json_is(split, JSON_FALSE);
    t->meta.prepend = str_is(s, "always") ? TOK_ALWAYS : str_is(s, "first") ? TOK_FIRST : TOK_NEVER;
    if (json_is(prefix, JSON_FALSE)) t->meta.prepend = TOK_NEVER;
    if (t->meta.prepend == TOK_NEVER && !json_is(prefix, JSON_FALSE) && !str_is(s, "never"))
        return tok_unsupported(e, "pre_tokenizer Metaspace: the prepend_scheme", s);
    if (t->meta.mark.n >= 1 && t->meta.mark.n <= 4) return 0;
    return tok_unsupported(e, "pre_tokenizer Metaspace: the replacement", t->meta.mark);
}

static int tok_load_pre(tok *t, const json *v, toka_err *e) {
    str type = tok_type(v);
    if (t->byte_level || t->meta.mark.n)
        return TOK_FAIL("pre_tokenizer \"%.*s\" behind ByteLevel or Metaspace is not supported", STRF(type));
    if (str_is(type, "Split")) return tok_load_split(t, v, e);
    if (str_is(type, "Digits"))
        return tok_add_step(t, json_true(json_get(v, "individual_digits")) ? &tok_each_digit : &tok_all_digits, false, e);
    if (str_is(type, "Metaspace")) {
        if (t->n_steps) return TOK_FAIL("pre_tokenizer \"Metaspace\" behind another is not supported");
        return tok_load_metaspace(t, v, e);
    }
    if (!str_is(type, "ByteLevel")) return tok_unsupported(e, "pre_tokenizer", type);
    t->byte_level = true;
    t->prefix_space = json_true(json_get(v, "add_prefix_space"));
    if (t->prefix_space && t->n_steps)
        return TOK_FAIL("pre_tokenizer ByteLevel: add_prefix_space behind another is not supported");
    return json_is(json_get(v, "use_regex"), JSON_FALSE) ? 0 : tok_add_step(t, &tok_rules[0], false, e);
}

static int tok_add_outer(tok *t, ids *to, const json *id, toka_err *e) {
    int64_t k = json_int(id, -1);
    if (k < 0 || k >= t->n_ids)
        return TOK_FAIL("post_processor: id %lld, but the vocabulary ends at %d", (long long)k, t->n_ids - 1);
    ids_push(to, (int32_t)k);
    return 0;
}

/* TemplateProcessing: the pieces before and behind sequence A of "single". */
static int tok_load_template(tok *t, const json *v, ids *head, ids *tail, toka_err *e) {
    const json *single = json_get(v, "single"), *tokens = json_get(v, "special_tokens");
    int n_sequences = 0;
    if (!json_is(single, JSON_ARRAY) || single->n > 64)
        return TOK_FAIL("post_processor: \"single\" is not an array of 1 to 64");
    JSON_EACH(it, single) {
        const json *special = json_get(it, "SpecialToken"), *list = NULL;
        str id = json_str(json_get(special, "id"));
        if (!special) {
            if (!str_is(json_str(json_get(json_get(it, "Sequence"), "id")), "A") || n_sequences++)
                return TOK_FAIL("post_processor: \"single\" must have sequence A once");
            continue;
        }
        if (json_is(tokens, JSON_OBJECT))
            JSON_MEMBERS(key, tokens) if (str_eq(json_str(key), id)) list = json_get(key + 1, "ids");
        if (!json_is(list, JSON_ARRAY))
            return TOK_FAIL("post_processor: no ids for the special token \"%.*s\"", STRF(id));
        JSON_EACH(k, list) if (tok_add_outer(t, n_sequences ? tail : head, k, e)) return e->code;
    }
    if (!n_sequences) return TOK_FAIL("post_processor: \"single\" must have sequence A once");
    return 0;
}

static int tok_load_post(tok *t, const json *v, toka_err *e) {
    str type = tok_type(v);
    ids head = {0}, tail = {0};
    int err = 0;
    if (str_is(type, "TemplateProcessing")) {
        err = tok_load_template(t, v, &head, &tail, e);
    } else if (str_is(type, "RobertaProcessing") || str_is(type, "BertProcessing")) {
        err = tok_add_outer(t, &head, json_at(json_get(v, "cls"), 1), e);
        if (!err) err = tok_add_outer(t, &tail, json_at(json_get(v, "sep"), 1), e);
    } else if (!str_is(type, "ByteLevel")) {
        err = tok_unsupported(e, "post_processor", type);
    }
    for (size_t i = 0; !err && i < t->head.n; i++) ids_push(&head, t->head.p[i]); /* a later processor stands outside */
    for (size_t i = 0; !err && i < tail.n; i++) ids_push(&t->tail, tail.p[i]);
    ids_free(&tail), ids_free(&t->head);
    t->head = head;
    return err;
}

/* Every token's decoded text with `from` replaced. */
static int tok_decode_replace(tok *t, const json *v, toka_err *e) {
    const json *pattern = json_get(v, "pattern");
    str from = tok_literal(pattern), to = tok_keep(t, json_str(json_get(v, "content")));
    buf b = {0};
    if (!from.n) return tok_unsupported(e, "decoder Replace: the pattern", json_str(json_get(pattern, "Regex")));
    if (tok_grows(t, from, to)) return TOK_FAIL("decoders make a text over %d times longer", TOK_MAX_GROWTH);
    for (int i = 0; i < t->n_ids; i++) {
        str s = t->text[i].n ? tok_replace(t->text[i], from, to, &b) : t->text[i];
        if (s.p != t->text[i].p) t->text[i] = tok_keep(t, s);
    }
    buf_free(&b);
    return 0;
}

/* ByteLevel: text of the alphabet becomes the bytes it stands for, added tokens' text too; other text stays. */
static void tok_decode_level(tok *t) {
    buf b = {0};
    t->decoder = TOK_BYTES;
    for (int i = 0; i < t->n_ids; i++) {
        if (t->byte_level && t->key[i].p && !t->added_at[i]) continue; /* is so already */
        buf_clear(&b);
        if (tok_unmap(t->text[i], &b)) t->text[i] = tok_keep(t, buf_view(&b));
    }
    buf_free(&b);
}

/* <0x41> decodes to the byte 0x41. */
static void tok_decode_bytes(tok *t) {
    t->decode_fallback = true;
    for (int i = 0; i < t->n_ids; i++) {
        str s = t->text[i];
        if (s.n != 6 || !str_starts(s, STR("<0x")) || s.p[5] != '>') continue;
        if (!isxdigit((unsigned char)s.p[3]) || !isxdigit((unsigned char)s.p[4])) continue;
        char hex[3] = {s.p[3], s.p[4], 0}, *byte = arena_alloc(&t->mem, 1);
        *byte = (char)strtol(hex, NULL, 16);
        t->text[i] = (str){byte, 1};
        t->flag[i] |= TOK_BYTE;
    }
}

static int tok_load_decoder(tok *t, const json *v, toka_err *e) {
    str type = tok_type(v);
    bool chain = t->decoder == TOK_CHAIN;
    if (t->decoder != TOK_JOIN && !chain) return tok_unsupported(e, "decoder in this Sequence:", type);
    if (str_is(type, "ByteLevel") && !chain) return tok_decode_level(t), 0;
    if (str_is(type, "Metaspace") && !chain) {
        str scheme = json_get(v, "prepend_scheme") ? json_str(json_get(v, "prepend_scheme")) : STR("always");
        t->meta_mark = tok_keep(t, json_str(json_get(v, "replacement")));
        t->meta_drop = !str_is(scheme, "never") && !json_is(json_get(v, "add_prefix_space"), JSON_FALSE);
        t->decoder = TOK_META;
        return t->meta_mark.n ? 0 : tok_unsupported(e, "decoder Metaspace: the replacement", t->meta_mark);
    }
    t->decoder = TOK_CHAIN;
    if (str_is(type, "Replace") && !t->decode_fallback && !t->decode_fuse) return tok_decode_replace(t, v, e);
    if (str_is(type, "ByteFallback") && !t->decode_fallback && !t->decode_fuse) return tok_decode_bytes(t), 0;
    if (str_is(type, "Fuse")) return t->decode_fuse = true, 0;
    if (str_is(type, "Strip") && t->decode_fuse && !t->strip && json_int(json_get(v, "stop"), -1) == 0) {
        int64_t n = json_int(json_get(v, "start"), -1);
        t->strip_char = tok_keep(t, json_str(json_get(v, "content")));
        if (n >= 0 && n <= INT32_MAX && t->strip_char.n && t->strip_char.n <= 4) return t->strip = (int)n, 0;
    }
    return tok_unsupported(e, "decoder in this place:", type);
}

/* ---- Loading: the whole ---- */

static int tok_load_model(tok *t, const json *root, toka_err *e) {
    const json *model = json_get(root, "model"), *vocab = json_get(model, "vocab");
    const json *dropout = json_get(model, "dropout"), *prefix = json_get(model, "continuing_subword_prefix");
    const json *suffix = json_get(model, "end_of_word_suffix"), *added = json_get(root, "added_tokens");
    if (!json_is(model, JSON_OBJECT)) return TOK_FAIL("no object \"model\"");
    if (!str_is(tok_type(model), "BPE")) return tok_unsupported(e, "model type", tok_type(model));
    if (json_num(dropout, 0) != 0) return TOK_FAIL("model.dropout is not supported");
    if (json_str(prefix).n) return tok_unsupported(e, "model.continuing_subword_prefix", json_str(prefix));
    if (json_str(suffix).n) return tok_unsupported(e, "model.end_of_word_suffix", json_str(suffix));
    t->ignore_merges = json_true(json_get(model, "ignore_merges"));
    t->fuse_unk = json_true(json_get(model, "fuse_unk"));
    t->byte_fallback = json_true(json_get(model, "byte_fallback"));
    if (tok_load_vocab(t, vocab, json_is(added, JSON_ARRAY) ? added : NULL, e)) return e->code;
    if (tok_load_bytes(t, model, e)) return e->code;
    if (tok_load_merges(t, json_get(model, "merges"), e)) return e->code;
    return tok_load_added(t, added, vocab->n, e);
}

static int tok_load_root(tok *t, const json *root, toka_err *e) {
    if (!json_is(root, JSON_OBJECT)) return TOK_FAIL("an object was expected");
    t->growth = 1;
    if (tok_load_each(t, json_get(root, "normalizer"), "normalizers", 0, tok_load_normal, e)) return e->code;
    if (tok_load_each(t, json_get(root, "pre_tokenizer"), "pretokenizers", 0, tok_load_pre, e)) return e->code;
    if (tok_load_model(t, root, e)) return e->code;
    if (tok_load_each(t, json_get(root, "post_processor"), "processors", 0, tok_load_post, e)) return e->code;
    t->growth = 1;
    if (tok_load_each(t, json_get(root, "decoder"), "decoders", 0, tok_load_decoder, e)) return e->code;
    if (t->byte_level && t->decoder != TOK_BYTES)
        return tok_unsupported(e, "with a ByteLevel pre-tokenizer the decoder", tok_type(json_get(root, "decoder")));
    return 0;
}

/* Reads tokenizer.json. config_json, the text of tokenizer_config.json or nothing, is for what may come: nothing in it
 * changes what Hugging Face `tokenizers` does. Both texts may go away after. *out is the caller's until tok_del. */
static int tok_load(tok **out, str tokenizer_json, str config_json, toka_err *e) {
    arena a = {0};
    toka_err why;
    (void)config_json;
    *out = NULL;
    const json *root = json_parse(&a, tokenizer_json, json_trusted, &why);
    if (!root) {
        arena_free(&a);
        return fail(e, why.code, "tokenizer.json: %.400s", why.msg);
    }
    tok *t = mem_zalloc(sizeof *t);
    uni_init(&t->uni);
    t->slots = mem_check(aligned_alloc(64, TOK_SLOTS * sizeof *t->slots));
    for (int i = 0; i < TOK_SLOTS; i++)
        for (int k = 0; k < 8; k++) atomic_init(&t->slots[i].w[k], 0);
    int err = tok_load_root(t, root, e);
    arena_free(&a);
    if (err) tok_del(t);
    else *out = t;
    return err;
}

static void tok_del(tok *t) {
    if (!t) return;
    uni_free(&t->uni);
    arena_free(&t->mem);
    free(t->key), free(t->name), free(t->text), free(t->flag), free(t->keys.places), free(t->names.places);
    free(t->merges), free(t->joins), free(t->slots), free(t->added), free(t->added_at);
    free(t->raw.sorted), free(t->normalized.sorted);
    ids_free(&t->head), ids_free(&t->tail);
    free(t);
}

/* ===========================================================================
 * MARK: 7. Chat template: parser [pure]
 * The Jinja that chat templates are written in, as Hugging Face sets it up: trim_blocks and lstrip_blocks on, autoescape
 * off, break and continue, the `generation` tag. This chapter goes from source to tree; the next one has the values that a
 * render works on, the one behind it walks the tree.
 *
 * Source -> tmpl_lex (tokens; all whitespace control happens there) -> tmpl_parser (one tmpl_node per construct) -> tmpl.
 * A tmpl never changes after parsing: any number of threads may render it. Names of variables become small numbers.
 *
 * Always: the parser nests at most TMPL_NESTING deep, so that its recursion is bounded; every error says
 * "template line N: " and names the construct. Source and texts are UTF-8.
 * Not here, and an error: include, import, extends, block, raw, with, call, do, recursive loops, *args, the operator **,
 * neighbouring strings as one, integers beyond 64 bits. A filter or test that is not known is an error when it runs.
 * =========================================================================== */

enum { TMPL_NESTING = 100, TMPL_MAX_SOURCE = 1 << 20, TMPL_MAX_NAMES = 1000 };

/* ---- Tree ---- */

typedef enum tmpl_kind {
    /* statements; bodies are chains through .next                                           */
    TN_TEXT,     /* s                                                                        */
    TN_PRINT,    /* a: expression                                                            */
    TN_IF,       /* a: condition (NULL: the else arm), b: body, c: next arm                  */
    TN_FOR,      /* a: target, b: what is walked, c: body, d: condition or NULL, e: else     */
    TN_SET,      /* a: target, b: expression                                                 */
    TN_SETBLOCK, /* a: target, b: filters over TN_CAPTURED, c: body                          */
    TN_FILTERED, /* b: filters over TN_CAPTURED, c: body                                     */
    TN_MACRO,    /* id, s: name, b: parameters (TN_PARAM), c: body                           */
    TN_SCOPE,    /* c: body with a scope of its own (generation)                             */
    TN_BREAK,
    TN_CONTINUE,
    /* expressions                                                                           */
    TN_NONE,
    TN_BOOL,     /* i                                                                        */
    TN_INT,      /* i                                                                        */
    TN_FLOAT,    /* f                                                                        */
    TN_STRING,   /* s                                                                        */
    TN_NAME,     /* id, s                                                                    */
    TN_LIST,     /* b: chain of elements                                                     */
    TN_TUPLE,    /* b: chain of elements                                                     */
    TN_DICT,     /* b: chain key, value, key, value ...                                      */
    TN_ATTR,     /* a.s                                                                      */
    TN_ITEM,     /* a[b]                                                                     */
    TN_SLICE,    /* a[b:c:d], each of b, c, d may be NULL                                    */
    TN_CALL,     /* a(b: chain of arguments)                                                 */
    TN_FILTER,   /* a|s(b)                                                                   */
    TN_TEST,     /* a is s(b); op 1: is not                                                  */
    TN_NOT,      /* not a                                                                    */
    TN_SIGN,     /* op '-' or '+', a                                                         */
    TN_BINARY,   /* a op b                                                                   */
    TN_COND,     /* b if a else c, c may be NULL                                             */
    TN_CAPTURED, /* the text that the set or filter block around it has collected            */
    /* parts                                                                                 */
    TN_KEYWORD,  /* s=a in arguments                                                         */
    TN_PARAM,    /* id, s, a: default or NULL                                                */
    TN_NSREF     /* namespace variable id, attribute s, as a target                          */
} tmpl_kind;

#define OP2(a, b) ((a) | (b) << 8) /* a sign of two characters; one of a single character stands for itself */
enum {
    OP_AND = 'a', OP_OR = 'o', OP_IN = 'i', OP_NOT_IN = 'n', OP_FLOOR = OP2('/', '/'),
    OP_EQ = OP2('=', '='), OP_NE = OP2('!', '='), OP_LE = OP2('<', '='), OP_GE = OP2('>', '=')
};

typedef struct tmpl_node tmpl_node;
struct tmpl_node {
    uint8_t kind; /* tmpl_kind */
    uint16_t op;
    int line;
    int id; /* a variable's number */
    str s;
    int64_t i;
    double f;
    tmpl_node *a, *b, *c, *d, *e, *next;
};

enum { TMPL_LOOP }; /* number of the variable `loop` */

typedef struct tmpl {
    arena a; /* nodes and their texts */
    tmpl_node *body;
    str names[TMPL_MAX_NAMES]; /* of variables, by number */
    int n_names;
} tmpl;

/* ---- Tokens ---- */

typedef enum tmpl_token_type {
    TT_DATA, TT_BLOCK, TT_PRINT, TT_CLOSE, TT_NAME, TT_STRING, TT_INT, TT_FLOAT, TT_OP, TT_END
} tmpl_token_type;

typedef struct tmpl_token {
    uint8_t type;
    uint16_t op; /* TT_OP */
    int line;
    str s; /* text of data, names, numbers; a string's value */
} tmpl_token;

typedef struct tmpl_lexer {
    str src;
    size_t at;
    int line;
    tmpl_token *tokens;
    size_t n, cap;
    arena *a;                   /* string values */
    char closers[TMPL_NESTING]; /* the brackets that must close before the tag may end */
    int n_open;
    toka_err *e;
} tmpl_lexer;

__attribute__((format(printf, 3, 4))) static bool tmpl_syntax(toka_err *e, int line, const char *fmt, ...) {
    char what[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    fail(e, TOKA_E_INPUT, "template line %d: %s", line, what);
    return false;
}

/* Where a word stands among words separated by single spaces, -1 if it does not. */
static int tmpl_word_index(const char *words, str word) {
    for (int i = 0; *words; i++) {
        size_t n = strcspn(words, " ");
        if (str_eq(word, (str){words, n})) return i;
        words += n + (words[n] == ' ');
    }
    return -1;
}

/* Bytes of the white space character at s[i], 0 if it is none. The set is Python's str.isspace. */
static size_t tmpl_space(str s, size_t i) {
    int n;
    if (i >= s.n) return 0;
    uint32_t c = uni_next(s.p + i, &n);
    bool space = (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
                 (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
    return space ? (size_t)n : 0;
}
static size_t tmpl_skip_space(str s, size_t i) {
    for (size_t n; (n = tmpl_space(s, i)) != 0;) i += n;
    return i;
}
static size_t tmpl_last_cp(str s) { /* where the last code point of a text that is not empty begins */
    size_t i = s.n - 1;
    while (i && (s.p[i] & 0xC0) == 0x80) i--;
    return i;
}
/* s without the white space at its ends. */
static str tmpl_trim(str s, bool left, bool right) {
    if (left) s = str_sub(s, tmpl_skip_space(s, 0), s.n);
    while (right && s.n && tmpl_space(s, tmpl_last_cp(s))) s.n = tmpl_last_cp(s);
    return s;
}

static void tmpl_push(tmpl_lexer *x, int type, int op, str s) {
    if (x->n == x->cap) {
        x->cap = MAX(x->cap * 2, (size_t)256);
        x->tokens = mem_realloc(x->tokens, x->cap * sizeof *x->tokens);
    }
    x->tokens[x->n++] = (tmpl_token){.type = (uint8_t)type, .op = (uint16_t)op, .line = x->line, .s = s};
}

static char tmpl_char(const tmpl_lexer *x, size_t at) { return at < x->src.n ? x->src.p[at] : 0; }
static bool tmpl_sees(const tmpl_lexer *x, size_t at, const char *what) {
    return at <= x->src.n && str_starts(str_sub(x->src, at, x->src.n), str_c(what));
}
static void tmpl_advance(tmpl_lexer *x, size_t to) { /* counts the lines on the way */
    for (; x->at < to; x->at++) x->line += x->src.p[x->at] == '\n';
}

/* If a tag may end at `at`, the first byte behind it, else 0. closer is '%', '}' or '#'. A "-" takes the white space behind
 * with it; blocks and comments take one line feed (trim_blocks) unless they end in "+". */
static size_t tmpl_tag_end(const tmpl_lexer *x, size_t at, char closer) {
    const char end[] = {closer, '}', 0};
    char sign = tmpl_char(x, at);
    if (sign == '-' && tmpl_sees(x, at + 1, end)) return tmpl_skip_space(x->src, at + 3);
    if (sign == '+' && closer != '}' && tmpl_sees(x, at + 1, end)) return at + 3;
    if (!tmpl_sees(x, at, end)) return 0;
    return at + 2 + (closer != '}' && tmpl_char(x, at + 2) == '\n');
}

/* The text from x->at up to a tag that opens at `open` with this sign: "-" takes all white space before it; without a sign
 * a block or comment that stands alone at the start of its line takes that line's indentation (lstrip_blocks). */
static void tmpl_data(tmpl_lexer *x, size_t open, char kind, char sign) {
    str s = str_sub(x->src, x->at, open);
    if (sign == '-') {
        s = tmpl_trim(s, false, true);
    } else if (sign != '+' && (kind == '%' || kind == '#')) {
        size_t line = s.n;
        while (line && s.p[line - 1] != '\n') line--;
        bool starts = line > 0 || x->at == 0 || x->src.p[x->at - 1] == '\n';
        if (starts && tmpl_skip_space(s, line) == s.n) s.n = line;
    }
    if (s.n) tmpl_push(x, TT_DATA, 0, s);
    tmpl_advance(x, open);
}

static bool tmpl_comment(tmpl_lexer *x) {
    for (size_t at = x->at; at < x->src.n; at++) {
        size_t end = tmpl_tag_end(x, at, '#');
        if (end) return tmpl_advance(x, end), true;
    }
    return tmpl_syntax(x->e, x->line, "comment without an end");
}

/* One escape of a string literal at s[*i] (on the backslash), as in Python; an unknown one stays as it is written. */
static bool tmpl_escape(tmpl_lexer *x, str s, size_t *i, buf *out) {
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    char c = s.p[*i + 1], utf8[4];
    const char *k = c ? strchr(from, c) : NULL;
    int digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    *i += 2;
    if (c == '\n') return true;
    if (k) return buf_char(out, to[k - from]), true;
    if (!digits) return buf_put(out, s.p + *i - 2, 2), true;
    uint32_t u = 0;
    for (; digits && *i < s.n && isxdigit((unsigned char)s.p[*i]); digits--, ++*i)
        u = u << 4 | (uint32_t)(isdigit((unsigned char)s.p[*i]) ? s.p[*i] - '0' : (s.p[*i] | 32) - 'a' + 10);
    if (digits || u > 0x10FFFF) return tmpl_syntax(x->e, x->line, "wrong \\%c escape in a string", c);
    if (u >= 0xD800 && u <= 0xDFFF) u = 0xFFFD;
    return buf_put(out, utf8, (size_t)utf8_put(utf8, u)), true;
}

static bool tmpl_string(tmpl_lexer *x) {
    size_t from = x->at + 1, to = from;
    char quote = x->src.p[x->at];
    while (to < x->src.n && x->src.p[to] != quote) to += x->src.p[to] == '\\' ? 2 : 1;
    if (to >= x->src.n) return tmpl_syntax(x->e, x->line, "string without an end");
    str s = str_sub(x->src, from, to);
    buf b = {0};
    bool ok = true;
    for (size_t i = 0; ok && i < s.n;) {
        if (s.p[i] == '\\') ok = tmpl_escape(x, s, &i, &b);
        else buf_char(&b, s.p[i++]);
    }
    if (ok) tmpl_push(x, TT_STRING, 0, arena_str(x->a, buf_view(&b)));
    buf_free(&b);
    tmpl_advance(x, to + 1);
    return ok;
}

static size_t tmpl_digits(const tmpl_lexer *x, size_t at) {
    while (isdigit((unsigned char)tmpl_char(x, at))) at++;
    return at;
}

static void tmpl_number(tmpl_lexer *x) {
    size_t end = tmpl_digits(x, x->at);
    int type = TT_INT;
    if (tmpl_char(x, end) == '.' && isdigit((unsigned char)tmpl_char(x, end + 1)))
        end = tmpl_digits(x, end + 1), type = TT_FLOAT;
    if ((tmpl_char(x, end) | 32) == 'e') {
        size_t power = end + 1 + (tmpl_char(x, end + 1) == '+' || tmpl_char(x, end + 1) == '-');
        if (isdigit((unsigned char)tmpl_char(x, power))) end = tmpl_digits(x, power), type = TT_FLOAT;
    }
    tmpl_push(x, type, 0, str_sub(x->src, x->at, end));
    x->at = end;
}

static bool tmpl_sign(tmpl_lexer *x) {
    static const char twos[][3] = {"//", "==", "!=", ">=", "<="};
    char c = x->src.p[x->at];
    for (int i = 0; i < COUNT(twos); i++)
        if (tmpl_sees(x, x->at, twos[i])) {
            tmpl_push(x, TT_OP, OP2(twos[i][0], twos[i][1]), str_sub(x->src, x->at, x->at + 2));
            return x->at += 2, true;
        }
    if (!c || !strchr("+-/*%~[](){}><=.:|,", c)) {
        int n = utf8_len(x->src.p + x->at, x->src.p + x->src.n);
        return tmpl_syntax(x->e, x->line, "unexpected character '%.*s'", n, x->src.p + x->at);
    }
    if (strchr("([{", c)) {
        if (x->n_open == TMPL_NESTING) return tmpl_syntax(x->e, x->line, "brackets nested more than %d deep", TMPL_NESTING);
        x->closers[x->n_open++] = (char)(c == '(' ? ')' : c + 2);
    }
    if (strchr(")]}", c) && (!x->n_open || x->closers[--x->n_open] != c))
        return tmpl_syntax(x->e, x->line, "unexpected '%c'", c);
    tmpl_push(x, TT_OP, c, str_sub(x->src, x->at, x->at + 1));
    return x->at++, true;
}

/* The tokens inside {% %} or {{ }}, up to and with the end. */
static bool tmpl_tag(tmpl_lexer *x, char closer) {
    int line = x->line;
    for (;;) {
        tmpl_advance(x, tmpl_skip_space(x->src, x->at));
        size_t end = x->n_open ? 0 : tmpl_tag_end(x, x->at, closer);
        if (end) {
            tmpl_push(x, TT_CLOSE, 0, closer == '%' ? STR("%}") : STR("}}"));
            return tmpl_advance(x, end), true;
        }
        if (x->at >= x->src.n) return tmpl_syntax(x->e, line, "tag without its end '%c}'", closer);
        unsigned char c = (unsigned char)x->src.p[x->at];
        if (isdigit(c)) {
            tmpl_number(x);
        } else if (isalpha(c) || c == '_' || c >= 0x80) {
            end = x->at;
            while (isalnum((unsigned char)tmpl_char(x, end)) || tmpl_char(x, end) == '_' || tmpl_char(x, end) & 0x80) end++;
            tmpl_push(x, TT_NAME, 0, str_sub(x->src, x->at, end));
            x->at = end;
        } else if (c == '"' || c == '\'' ? !tmpl_string(x) : !tmpl_sign(x)) {
            return false;
        }
    }
}

/* All tokens of the source; the last is TT_END. */
static bool tmpl_lex(tmpl_lexer *x) {
    str s = x->src;
    while (x->at < s.n) {
        size_t open = x->at;
        while (open < s.n && !(s.p[open] == '{' && tmpl_char(x, open + 1) && strchr("%{#", s.p[open + 1]))) open++;
        char kind = tmpl_char(x, open + 1), sign = tmpl_char(x, open + 2);
        tmpl_data(x, open, kind, sign);
        if (open == s.n) break;
        x->at = open + 2 + (sign == '-' || sign == '+');
        if (kind != '#') tmpl_push(x, kind == '%' ? TT_BLOCK : TT_PRINT, 0, str_sub(s, open, open + 2));
        if (kind == '#' ? !tmpl_comment(x) : !tmpl_tag(x, kind == '%' ? '%' : '}')) return false;
    }
    tmpl_push(x, TT_END, 0, STR("end of template"));
    return true;
}

/* ---- Parser: what everything needs ---- */

typedef struct tmpl_parser {
    tmpl *t;
    const tmpl_token *tok; /* the next token; the one behind it may be looked at, as TT_END is the last */
    int depth, n_loops;    /* nesting now; loops around that break and continue can mean */
    toka_err *e;
} tmpl_parser;

static tmpl_node *tmpl_expr(tmpl_parser *p);
static bool tmpl_body(tmpl_parser *p, const char *ends, tmpl_node **body);

/* Every failing parse function returns NULL (or false); this one fills *e and is NULL itself. */
static tmpl_node *tmpl_expected(tmpl_parser *p, const char *what) {
    tmpl_syntax(p->e, p->tok->line, "%s expected, found '%.*s'", what, STRF(p->tok->s));
    return NULL;
}

static tmpl_node *tmpl_new(tmpl_parser *p, int kind, int line) {
    tmpl_node *n = arena_zalloc(&p->t->a, sizeof *n);
    n->kind = (uint8_t)kind;
    n->line = line;
    return n;
}
static tmpl_node *tmpl_take(tmpl_parser *p, int kind) { /* the next token as a node */
    tmpl_node *n = tmpl_new(p, kind, p->tok->line);
    n->s = p->tok->s;
    n->op = p->tok++->op;
    return n;
}

/* A parse function that may come to call itself is called through this one. */
static tmpl_node *tmpl_nested(tmpl_parser *p, tmpl_node *(*parse)(tmpl_parser *)) {
    if (p->depth == TMPL_NESTING)
        return tmpl_syntax(p->e, p->tok->line, "nested more than %d deep", TMPL_NESTING), NULL;
    p->depth++;
    tmpl_node *n = parse(p);
    p->depth--;
    return n;
}

static bool tmpl_at_op(const tmpl_parser *p, int op) { return p->tok->type == TT_OP && p->tok->op == op; }
static bool tmpl_at_word(const tmpl_parser *p, const char *z) { return p->tok->type == TT_NAME && str_is(p->tok->s, z); }
static bool tmpl_take_op(tmpl_parser *p, int op) { return tmpl_at_op(p, op) && p->tok++; }
static bool tmpl_take_word(tmpl_parser *p, const char *z) { return tmpl_at_word(p, z) && p->tok++; }
static bool tmpl_need_op(tmpl_parser *p, char op) {
    const char z[] = {'\'', op, '\'', 0};
    return tmpl_take_op(p, op) || tmpl_expected(p, z);
}
static bool tmpl_need_close(tmpl_parser *p) {
    return (p->tok->type == TT_CLOSE && p->tok++) || tmpl_expected(p, "end of the tag");
}
/* Between the items of a bracket: takes a comma or the closing bracket. *closed says which; false: neither is there. */
static bool tmpl_between(tmpl_parser *p, bool first, char closer, bool *closed) {
    const char z[] = {'\'', ',', '\'', ' ', 'o', 'r', ' ', '\'', closer, '\'', 0};
    *closed = tmpl_take_op(p, closer);
    if (*closed || first) return true;
    if (!tmpl_take_op(p, ',')) return tmpl_expected(p, z);
    *closed = tmpl_take_op(p, closer);
    return true;
}

static int tmpl_name_id(tmpl_parser *p, str s) { /* a variable's number, -1 after an error */
    tmpl *t = p->t;
    for (int i = 0; i < t->n_names; i++)
        if (str_eq(t->names[i], s)) return i;
    if (t->n_names == TMPL_MAX_NAMES)
        return tmpl_syntax(p->e, p->tok->line, "more than %d different names", TMPL_MAX_NAMES), -1;
    t->names[t->n_names] = s;
    return t->n_names++;
}

static tmpl_node *tmpl_name(tmpl_parser *p, int kind) { /* the name token as a node of this kind */
    if (p->tok->type != TT_NAME) return tmpl_expected(p, "name");
    tmpl_node *n = tmpl_take(p, kind);
    n->id = tmpl_name_id(p, n->s);
    return n->id >= 0 ? n : NULL;
}

/* Several items with commas: a tuple; one without a comma: itself. In parentheses it may be empty. */
static tmpl_node *tmpl_tuple(tmpl_parser *p, tmpl_node *(*item)(tmpl_parser *), bool parentheses) {
    tmpl_node *tuple = tmpl_new(p, TN_TUPLE, p->tok->line), **tail = &tuple->b;
    bool comma = false;
    for (;;) {
        if (p->tok->type == TT_CLOSE || tmpl_at_op(p, ')') || tmpl_at_op(p, '=') || tmpl_at_word(p, "in")) break;
        if (!(*tail = item(p))) return NULL;
        tail = &(*tail)->next;
        if (!tmpl_take_op(p, ',')) break;
        comma = true;
    }
    if (!tuple->b && !parentheses) return tmpl_expected(p, "expression");
    return comma || !tuple->b ? tuple : tuple->b;
}

/* ---- Expressions ---- */

/* Behind '(' up to ')': positional arguments first, then name=value. */
static bool tmpl_arguments(tmpl_parser *p, tmpl_node **args) {
    bool keyword = false, closed;
    for (tmpl_node **tail = args;; tail = &(*tail)->next) {
        if (!tmpl_between(p, tail == args, ')', &closed)) return false;
        if (closed) return true;
        if (tmpl_at_op(p, '*')) return tmpl_syntax(p->e, p->tok->line, "* arguments are not supported");
        if (p->tok->type == TT_NAME && p->tok[1].type == TT_OP && p->tok[1].op == '=') {
            tmpl_node *n = *tail = tmpl_take(p, TN_KEYWORD);
            p->tok++;
            keyword = true;
            if (!(n->a = tmpl_expr(p))) return false;
        } else if (keyword) {
            return tmpl_syntax(p->e, p->tok->line, "positional argument behind a keyword argument");
        } else if (!(*tail = tmpl_expr(p))) {
            return false;
        }
    }
}

static tmpl_node *tmpl_int(tmpl_parser *p) {
    tmpl_node *n = tmpl_take(p, TN_INT);
    bool ok = n->s.n == 1 || n->s.p[0] != '0';
    for (size_t k = 0; ok && k < n->s.n; k++)
        ok = !__builtin_mul_overflow(n->i, 10, &n->i) && !__builtin_add_overflow(n->i, n->s.p[k] - '0', &n->i);
    if (!ok) tmpl_syntax(p->e, n->line, "integer '%.*s' is not supported", STRF(n->s));
    return ok ? n : NULL;
}

static tmpl_node *tmpl_list(tmpl_parser *p) {
    tmpl_node *n = tmpl_take(p, TN_LIST);
    bool closed;
    for (tmpl_node **tail = &n->b;; tail = &(*tail)->next) {
        if (!tmpl_between(p, !n->b, ']', &closed)) return NULL;
        if (closed) return n;
        if (!(*tail = tmpl_expr(p))) return NULL;
    }
}

static tmpl_node *tmpl_dict_literal(tmpl_parser *p) {
    tmpl_node *n = tmpl_take(p, TN_DICT);
    bool closed;
    for (tmpl_node **tail = &n->b;; tail = &(*tail)->next->next) {
        if (!tmpl_between(p, !n->b, '}', &closed)) return NULL;
        if (closed) return n;
        if (!(*tail = tmpl_expr(p)) || !tmpl_need_op(p, ':') || !((*tail)->next = tmpl_expr(p))) return NULL;
    }
}

/* A word that is a constant, 0 if it is none. */
static int tmpl_constant(str s, bool *value) {
    *value = str_is(s, "true") || str_is(s, "True");
    if (*value || str_is(s, "false") || str_is(s, "False")) return TN_BOOL;
    return str_is(s, "none") || str_is(s, "None") ? TN_NONE : 0;
}

static tmpl_node *tmpl_primary(tmpl_parser *p) {
    tmpl_node *n;
    bool value;
    int constant;
    switch (p->tok->type) {
    case TT_NAME:
        if (!(constant = tmpl_constant(p->tok->s, &value))) return tmpl_name(p, TN_NAME);
        n = tmpl_take(p, constant);
        n->i = value;
        return n;
    case TT_STRING: return tmpl_take(p, TN_STRING);
    case TT_INT: return tmpl_int(p);
    case TT_FLOAT:
        n = tmpl_take(p, TN_FLOAT);
        n->f = json_strtod(n->s);
        return n;
    default: break;
    }
    if (tmpl_at_op(p, '[')) return tmpl_list(p);
    if (tmpl_at_op(p, '{')) return tmpl_dict_literal(p);
    if (!tmpl_take_op(p, '(')) return tmpl_expected(p, "expression");
    n = tmpl_tuple(p, tmpl_expr, true);
    return n && tmpl_need_op(p, ')') ? n : NULL;
}

/* What stands in [ ] behind `of`: an index or a slice. */
static tmpl_node *tmpl_subscript(tmpl_parser *p, tmpl_node *of) {
    tmpl_node *n = tmpl_take(p, TN_ITEM), **part[3] = {&n->b, &n->c, &n->d};
    n->a = of;
    for (int i = 0; i < 3; i++) {
        if (!tmpl_at_op(p, ':') && !tmpl_at_op(p, ']') && !(*part[i] = tmpl_expr(p))) return NULL;
        if (i == 2 || !tmpl_take_op(p, ':')) break;
        n->kind = TN_SLICE;
    }
    if (n->kind == TN_ITEM && !n->b) return tmpl_expected(p, "subscript");
    return tmpl_need_op(p, ']') ? n : NULL;
}

static tmpl_node *tmpl_postfix(tmpl_parser *p, tmpl_node *n) { /* n[...], n(...), n.name, n.0 */
    while (n) {
        tmpl_node *of = n;
        if (tmpl_at_op(p, '[')) {
            n = tmpl_subscript(p, of);
        } else if (tmpl_at_op(p, '(')) {
            n = tmpl_take(p, TN_CALL);
            n->a = of;
            if (!tmpl_arguments(p, &n->b)) return NULL;
        } else if (tmpl_take_op(p, '.')) {
            if (p->tok->type != TT_NAME && p->tok->type != TT_INT) return tmpl_expected(p, "attribute name");
            bool number = p->tok->type == TT_INT;
            n = number ? tmpl_new(p, TN_ITEM, p->tok->line) : tmpl_take(p, TN_ATTR);
            n->a = of;
            if (number && !(n->b = tmpl_int(p))) return NULL;
        } else {
            break;
        }
    }
    return n;
}

/* The name and arguments of a filter or test over `of`. */
static tmpl_node *tmpl_applied(tmpl_parser *p, int kind, tmpl_node *of) {
    if (p->tok->type != TT_NAME) return tmpl_expected(p, kind == TN_FILTER ? "filter name" : "test name");
    tmpl_node *n = tmpl_take(p, kind);
    n->a = of;
    if (tmpl_at_op(p, '.')) return tmpl_expected(p, "known filter or test");
    return !tmpl_take_op(p, '(') || tmpl_arguments(p, &n->b) ? n : NULL;
}

/* a is [not] name [argument]: one argument may stand without parentheses. */
static tmpl_node *tmpl_test(tmpl_parser *p, tmpl_node *of) {
    bool negated = tmpl_take_word(p, "not");
    tmpl_node *n = tmpl_applied(p, TN_TEST, of);
    if (!n) return NULL;
    n->op = negated;
    if (p->tok[-1].type == TT_OP) return n; /* had parentheses */
    bool word = p->tok->type == TT_NAME && tmpl_word_index("else or and if", p->tok->s) < 0;
    bool literal = p->tok->type == TT_STRING || p->tok->type == TT_INT || p->tok->type == TT_FLOAT || tmpl_at_op(p, '[') ||
                   tmpl_at_op(p, '{');
    if (tmpl_at_word(p, "is")) return tmpl_expected(p, "one test only");
    if ((word || literal) && !(n->b = tmpl_postfix(p, tmpl_primary(p)))) return NULL;
    return n;
}

static tmpl_node *tmpl_signed(tmpl_parser *p) { /* an operand without filters: -a, a, a.b ... */
    if (!tmpl_at_op(p, '-') && !tmpl_at_op(p, '+')) return tmpl_postfix(p, tmpl_primary(p));
    tmpl_node *n = tmpl_take(p, TN_SIGN);
    return (n->a = tmpl_nested(p, tmpl_signed)) ? n : NULL;
}

static tmpl_node *tmpl_operand(tmpl_parser *p) { /* with filters and tests, which take the sign with them: (-3)|abs */
    tmpl_node *n = tmpl_signed(p);
    while (n) {
        if (tmpl_take_op(p, '|')) n = tmpl_applied(p, TN_FILTER, n);
        else if (tmpl_take_word(p, "is")) n = tmpl_test(p, n);
        else if (tmpl_at_op(p, '(')) n = tmpl_postfix(p, n);
        else break;
    }
    return n;
}

/* Levels of binding, loosest first. Jinja's own order: ~ binds tighter than + and looser than *. */
enum { TL_OR, TL_AND, TL_NOT, TL_COMPARE, TL_ADD, TL_CONCAT, TL_MUL, TL_OPERAND };

/* The two-operand operator of this level at the next token (taken), or 0. */
static int tmpl_operator(tmpl_parser *p, int level) {
    static const uint16_t signs[][7] = {[TL_COMPARE] = {'<', '>', OP_LE, OP_GE, OP_EQ, OP_NE}, [TL_ADD] = {'+', '-'},
        [TL_CONCAT] = {'~'}, [TL_MUL] = {'*', '/', OP_FLOOR, '%'}};
    if (level == TL_OR) return tmpl_take_word(p, "or") ? OP_OR : 0;
    if (level == TL_AND) return tmpl_take_word(p, "and") ? OP_AND : 0;
    for (const uint16_t *s = signs[level]; *s; s++)
        if (tmpl_take_op(p, *s)) return *s;
    if (level != TL_COMPARE) return 0;
    if (tmpl_take_word(p, "in")) return OP_IN;
    if (!tmpl_at_word(p, "not") || p->tok[1].type != TT_NAME || !str_is(p->tok[1].s, "in")) return 0;
    return p->tok += 2, OP_NOT_IN;
}

static tmpl_node *tmpl_binary_node(tmpl_parser *p, int line, int op, tmpl_node *a, tmpl_node *b) {
    tmpl_node *n = tmpl_new(p, TN_BINARY, line);
    n->op = (uint16_t)op, n->a = a, n->b = b;
    return n;
}

static tmpl_node *tmpl_not(tmpl_parser *p);

/* Operands of one level from left to right. a < b < c becomes a < b and b < c: evaluating b twice changes nothing. */
static tmpl_node *tmpl_level(tmpl_parser *p, int level) {
    int line = p->tok->line, op;
    if (level == TL_OPERAND) return tmpl_operand(p);
    if (level == TL_NOT && tmpl_at_word(p, "not")) return tmpl_nested(p, tmpl_not);
    if (level == TL_NOT) return tmpl_level(p, level + 1);
    tmpl_node *n = tmpl_level(p, level + 1), *left = n;
    while (n && (op = tmpl_operator(p, level)) != 0) {
        tmpl_node *right = tmpl_level(p, level + 1);
        if (!right) return NULL;
        bool chained = level == TL_COMPARE && n != left;
        tmpl_node *pair = tmpl_binary_node(p, line, op, level == TL_COMPARE ? left : n, right);
        n = chained ? tmpl_binary_node(p, line, OP_AND, n, pair) : pair;
        left = right;
    }
    return n;
}
static tmpl_node *tmpl_not(tmpl_parser *p) {
    tmpl_node *n = tmpl_take(p, TN_NOT);
    return (n->a = tmpl_level(p, TL_NOT)) ? n : NULL;
}

static tmpl_node *tmpl_no_ternary(tmpl_parser *p) { return tmpl_level(p, TL_OR); }

static tmpl_node *tmpl_ternary(tmpl_parser *p) {
    tmpl_node *n = tmpl_level(p, TL_OR);
    while (n && tmpl_at_word(p, "if")) {
        tmpl_node *c = tmpl_take(p, TN_COND);
        c->b = n;
        if (!(c->a = tmpl_level(p, TL_OR))) return NULL;
        if (tmpl_take_word(p, "else") && !(c->c = tmpl_expr(p))) return NULL;
        n = c;
    }
    return n;
}
static tmpl_node *tmpl_expr(tmpl_parser *p) { return tmpl_nested(p, tmpl_ternary); }

/* ---- Statements ---- */

static tmpl_node *tmpl_one_target(tmpl_parser *p);
static tmpl_node *tmpl_target(tmpl_parser *p) { return tmpl_tuple(p, tmpl_one_target, false); }

static tmpl_node *tmpl_one_target(tmpl_parser *p) { /* name, namespace.name or (targets) */
    bool value;
    if (tmpl_take_op(p, '(')) {
        tmpl_node *tuple = tmpl_nested(p, tmpl_target);
        return tuple && tmpl_need_op(p, ')') ? tuple : NULL;
    }
    if (p->tok->type == TT_NAME && tmpl_constant(p->tok->s, &value)) return tmpl_expected(p, "name to assign to");
    tmpl_node *n = tmpl_name(p, TN_NAME);
    if (n && tmpl_take_op(p, '.')) {
        if (p->tok->type != TT_NAME) return tmpl_expected(p, "attribute name");
        n->kind = TN_NSREF;
        n->s = p->tok++->s;
    }
    return n;
}

/* The end of a tag and the body up to the tag that ends it, whose name is taken too. */
static bool tmpl_block(tmpl_parser *p, const char *ends, tmpl_node **body) {
    tmpl_take_op(p, ':');
    return tmpl_need_close(p) && tmpl_body(p, ends, body);
}
/* The same for a body in which break and continue cannot mean a loop outside of it. */
static bool tmpl_closed_block(tmpl_parser *p, const char *ends, tmpl_node **body) {
    int loops = p->n_loops;
    p->n_loops = 0;
    bool ok = tmpl_block(p, ends, body);
    p->n_loops = loops;
    return ok;
}

static tmpl_node *tmpl_if(tmpl_parser *p, int line) {
    tmpl_node *first = NULL;
    for (tmpl_node **tail = &first;; tail = &(*tail)->c) {
        tmpl_node *arm = *tail = tmpl_new(p, TN_IF, line);
        if (!(arm->a = tmpl_tuple(p, tmpl_no_ternary, false)) || !tmpl_block(p, "elif else endif", &arm->b)) return NULL;
        line = p->tok[-1].line;
        if (str_is(p->tok[-1].s, "elif")) continue;
        if (str_is(p->tok[-1].s, "endif")) return first;
        arm->c = tmpl_new(p, TN_IF, line);
        return tmpl_block(p, "endif", &arm->c->b) ? first : NULL;
    }
}

static tmpl_node *tmpl_for(tmpl_parser *p, int line) {
    tmpl_node *n = tmpl_new(p, TN_FOR, line);
    if (!(n->a = tmpl_target(p))) return NULL;
    if (!tmpl_take_word(p, "in")) return tmpl_expected(p, "'in'");
    if (!(n->b = tmpl_tuple(p, tmpl_no_ternary, false))) return NULL;
    if (tmpl_take_word(p, "if") && !(n->d = tmpl_expr(p))) return NULL;
    if (tmpl_at_word(p, "recursive")) return tmpl_syntax(p->e, line, "recursive loops are not supported"), NULL;
    p->n_loops++;
    bool ok = tmpl_block(p, "else endfor", &n->c);
    p->n_loops--;
    if (ok && str_is(p->tok[-1].s, "else")) ok = tmpl_block(p, "endfor", &n->e);
    return ok ? n : NULL;
}

/* Filters over what a block collects: "| name(args) | ..." or, in a filter tag, "name ...". */
static tmpl_node *tmpl_block_filters(tmpl_parser *p, bool first) {
    tmpl_node *n = tmpl_new(p, TN_CAPTURED, p->tok->line);
    while (n && (first || tmpl_take_op(p, '|'))) n = tmpl_applied(p, TN_FILTER, n), first = false;
    return n;
}

static tmpl_node *tmpl_set(tmpl_parser *p, int line) {
    tmpl_node *n = tmpl_new(p, TN_SET, line);
    if (!(n->a = tmpl_target(p))) return NULL;
    if (tmpl_take_op(p, '=')) return (n->b = tmpl_tuple(p, tmpl_expr, false)) ? n : NULL;
    n->kind = TN_SETBLOCK;
    return (n->b = tmpl_block_filters(p, false)) && tmpl_closed_block(p, "endset", &n->c) ? n : NULL;
}

static bool tmpl_params(tmpl_parser *p, tmpl_node **params) { /* behind '(' */
    bool defaults = false, closed;
    for (tmpl_node **tail = params;; tail = &(*tail)->next) {
        if (!tmpl_between(p, tail == params, ')', &closed)) return false;
        if (closed) return true;
        if (!(*tail = tmpl_name(p, TN_PARAM))) return false;
        if (tmpl_take_op(p, '=')) {
            defaults = true;
            if (!((*tail)->a = tmpl_expr(p))) return false;
        } else if (defaults) {
            return tmpl_expected(p, "a default value");
        }
    }
}

static tmpl_node *tmpl_macro_def(tmpl_parser *p) {
    tmpl_node *n = tmpl_name(p, TN_MACRO);
    if (!n || !tmpl_need_op(p, '(') || !tmpl_params(p, &n->b)) return NULL;
    return tmpl_closed_block(p, "endmacro", &n->c) ? n : NULL;
}

static tmpl_node *tmpl_statement(tmpl_parser *p) { /* behind "{%" */
    int line = p->tok->line;
    if (p->tok->type != TT_NAME) return tmpl_expected(p, "statement");
    str word = p->tok++->s;
    tmpl_node *n = tmpl_new(p, TN_SCOPE, line);
    switch (tmpl_word_index("if for set macro filter generation break continue", word)) {
    case 0: return tmpl_if(p, line);
    case 1: return tmpl_for(p, line);
    case 2: return tmpl_set(p, line);
    case 3: return tmpl_macro_def(p);
    case 4:
        n->kind = TN_FILTERED;
        return (n->b = tmpl_block_filters(p, true)) && tmpl_closed_block(p, "endfilter", &n->c) ? n : NULL;
    case 5: return tmpl_closed_block(p, "endgeneration", &n->c) ? n : NULL;
    case 6: case 7:
        n->kind = str_is(word, "break") ? TN_BREAK : TN_CONTINUE;
        return p->n_loops ? n : (tmpl_syntax(p->e, line, "%.*s outside of a loop", STRF(word)), NULL);
    default: return tmpl_syntax(p->e, line, "tag '%.*s' is not supported", STRF(word)), NULL;
    }
}

/* Text, {{ expression }} or {% statement %}. */
static tmpl_node *tmpl_piece(tmpl_parser *p) {
    tmpl_node *n;
    if (p->tok->type == TT_DATA) return tmpl_take(p, TN_TEXT);
    if (p->tok->type == TT_PRINT) {
        n = tmpl_take(p, TN_PRINT);
        return (n->a = tmpl_tuple(p, tmpl_expr, false)) && tmpl_need_close(p) ? n : NULL;
    }
    p->tok++;
    n = tmpl_nested(p, tmpl_statement);
    return n && tmpl_need_close(p) ? n : NULL;
}

/* Pieces up to a tag that is one of `ends`, whose name is taken too; with no ends up to the end of the template. */
static bool tmpl_body(tmpl_parser *p, const char *ends, tmpl_node **body) {
    int opened = p->tok->line;
    for (tmpl_node **tail = body;; tail = &(*tail)->next) {
        if (p->tok->type == TT_END && !*ends) return true;
        if (p->tok->type == TT_END)
            return tmpl_syntax(p->e, opened, "the template ends before '%.*s'", (int)strcspn(ends, " "), ends);
        if (p->tok->type == TT_BLOCK && p->tok[1].type == TT_NAME && tmpl_word_index(ends, p->tok[1].s) >= 0)
            return p->tok += 2, true;
        if (!(*tail = tmpl_piece(p))) return false;
    }
}

static void tmpl_del(tmpl *t) {
    if (!t) return;
    arena_free(&t->a);
    free(t);
}

/* The source as the tree sees it: valid UTF-8, line ends are "\n", one at the very end is dropped. */
static str tmpl_source(arena *a, str s) {
    buf valid = {0}, b = {0};
    s = uni_repair(s, &valid);
    for (size_t i = 0; i < s.n; i++)
        if (s.p[i] != '\r') buf_char(&b, s.p[i]);
        else if (i + 1 == s.n || s.p[i + 1] != '\n') buf_char(&b, '\n');
    if (b.n && b.p[b.n - 1] == '\n') b.n--;
    str clean = arena_str(a, buf_view(&b));
    buf_free(&valid), buf_free(&b);
    return clean;
}

/* Parses a template. *out is the caller's until tmpl_del. */
static int tmpl_parse(tmpl **out, str source, toka_err *e) {
    *out = NULL;
    if (source.n > TMPL_MAX_SOURCE)
        return fail(e, TOKA_E_INPUT, "template line 1: %zu bytes of source, at most %d", source.n, TMPL_MAX_SOURCE);
    tmpl *t = mem_zalloc(sizeof *t);
    t->names[TMPL_LOOP] = STR("loop");
    t->n_names = 1;
    tmpl_lexer x = {.line = 1, .a = &t->a, .e = e};
    x.src = tmpl_source(&t->a, source);
    bool ok = tmpl_lex(&x);
    tmpl_parser p = {.t = t, .tok = x.tokens, .e = e};
    ok = ok && tmpl_body(&p, "", &t->body);
    free(x.tokens);
    if (ok) return *out = t, 0;
    tmpl_del(t);
    return e->code;
}

/* ===========================================================================
 * MARK: 8. Chat template: values [pure]
 * What a render works on: values, the budget that every step is charged to, and what the language can do with values
 * without knowing of variables: their text, equality and order, dicts, JSON in and out, elements, operators, the filters
 * and methods of texts. Results are Python's; where Python raises, these functions fail.
 *
 * Always: functions return false after *e was filled in. Whatever is as long as the template wants is charged to the run
 * before it is made: steps by tmpl_work, nesting by tmpl_enter, memory by tmpl_alloc, length of texts by tmpl_put. Values
 * live in the run's arena. Texts are UTF-8, counted in code points; those of the context are borrowed.
 *
 * Not as in Python: range() and a dict's keys(), values() and items() are lists; dicts are searched from the front, as
 * theirs are small; the texts of lists escape control characters only.
 * =========================================================================== */

typedef enum tval_type {
    TV_ABSENT, /* an argument that was not given; no expression has this value */
    TV_UNDEFINED, TV_NONE, TV_BOOL, TV_INT, TV_FLOAT, TV_STR, TV_LIST, TV_TUPLE, TV_DICT,
    TV_GENERATOR, /* what map, select, reverse ... give: always true, can be walked once, has no length */
    TV_NAMESPACE, TV_LOOP, TV_MACRO, TV_METHOD, TV_FUNCTION
} tval_type;

static const char *tmpl_type_name(int type) { /* as Python calls it */
    static const char *const names[] = {"absent", "Undefined", "NoneType", "bool", "int", "float", "str", "list", "tuple",
        "dict", "generator", "Namespace", "LoopContext", "Macro", "method", "function"};
    return names[type];
}

/* One value, 16 bytes. All but namespaces, loops and generators never change, so values are shared freely. */
typedef struct tval {
    uint8_t type;
    uint8_t owner; /* TV_UNDEFINED: type of what it was looked up in, 0: it is a variable */
    bool safe;     /* TV_STR: marked as such; what is added to it is escaped for HTML */
    uint32_t n;    /* TV_STR, TV_UNDEFINED: bytes of s */
    union {
        int64_t i;     /* also of a bool */
        double f;
        const char *s; /* text; of an undefined value its name */
        struct tmpl_items *list; /* also of a generator */
        struct tmpl_dict *dict;  /* also of a namespace */
        struct tmpl_loop *loop;
        struct tmpl_macro *macro;
        struct tmpl_method *method;
        const struct tmpl_fn *fn;
    };
} tval;

typedef struct tmpl_items {
    size_t n;
    tval v[];
} tmpl_items;

typedef struct tmpl_member {
    tval key, v;
} tmpl_member;

typedef struct tmpl_dict { /* in order of insertion */
    size_t n, cap;
    tmpl_member *at;
} tmpl_dict;

static tval tv_none(void) { return (tval){.type = TV_NONE}; }
static tval tv_bool(bool b) { return (tval){.type = TV_BOOL, .i = b}; }
static tval tv_int(int64_t i) { return (tval){.type = TV_INT, .i = i}; }
static tval tv_float(double f) { return (tval){.type = TV_FLOAT, .f = f}; }
static tval tv_str(str s) { return (tval){.type = TV_STR, .n = (uint32_t)s.n, .s = s.p}; }
static tval tv_list(tval_type type, tmpl_items *list) { return (tval){.type = (uint8_t)type, .list = list}; }
static tval tv_undefined(str name, int owner) {
    return (tval){.type = TV_UNDEFINED, .owner = (uint8_t)owner, .n = (uint32_t)name.n, .s = name.p};
}
static str tv_text(tval v) { return (str){v.s, v.n}; } /* of a TV_STR */
static bool tv_is_integer(tval v) { return v.type == TV_BOOL || v.type == TV_INT; }
static bool tv_is_number(tval v) { return tv_is_integer(v) || v.type == TV_FLOAT; }
static bool tv_is_list(tval v) { return v.type == TV_LIST || v.type == TV_TUPLE; }
static double tv_double(tval v) { return v.type == TV_FLOAT ? v.f : (double)v.i; }

static bool tv_true(tval v) {
    switch (v.type) {
    case TV_BOOL: case TV_INT: return v.i != 0;
    case TV_FLOAT: return v.f != 0;
    case TV_STR: return v.n > 0;
    case TV_LIST: case TV_TUPLE: return v.list->n > 0;
    case TV_DICT: return v.dict->n > 0;
    default: return v.type > TV_NONE;
    }
}

/* ---- A render and its budget ---- */

typedef struct tmpl_limits { /* what one render may use */
    int64_t steps;           /* nodes evaluated, plus one for every few bytes or elements handled */
    int depth;               /* expressions, statements, macros, values inside one another */
    size_t output_bytes;     /* longest text, of the output as of anything on the way; at most 1 GiB */
} tmpl_limits;
UNUSED static const tmpl_limits tmpl_default_limits = {50 * 1000 * 1000, 400, (size_t)32 << 20};

#define TMPL_MEMORY(limits) (((size_t)64 << 20) + 8 * (limits).output_bytes) /* all values of one render, bytes */

/* A moment for strftime_now, each field with the meaning it has in struct tm: year since 1900, month 0 to 11, day 1 to 31,
 * weekday 0 to 6 from Sunday, yearday 0 to 365. */
typedef struct tmpl_time {
    int year, month, day, hour, minute, second, weekday, yearday;
} tmpl_time;

typedef struct tmpl_run {
    tmpl_time now;
    tmpl_limits left; /* steps and depth count down; output_bytes stays */
    size_t memory;    /* left, bytes */
    arena a;
    buf *out;                 /* where statements write */
    tval captured;            /* of the innermost set or filter block that is applying its filters */
    struct tmpl_scope *scope; /* innermost, NULL: the template's own level */
    tval *globals;            /* variables of that level by number; TV_ABSENT: none */
    char *last_text;          /* the latest long concatenation: `a + b + c + ...` grows it in place */
    size_t last_n, last_cap;
    int line;
    toka_err *e;
} tmpl_run;

__attribute__((format(printf, 2, 3))) static bool tmpl_fail(tmpl_run *r, const char *fmt, ...) {
    char what[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    return tmpl_syntax(r->e, r->line, "%s", what);
}

static bool tmpl_work(tmpl_run *r, size_t n) { /* n bytes or elements are about to be touched */
    r->left.steps -= (int64_t)(n / 8) + 1;
    return r->left.steps >= 0 || tmpl_fail(r, "too many steps");
}
static bool tmpl_enter(tmpl_run *r) { return r->left.depth-- > 0 || tmpl_fail(r, "nested too deep"); }
static bool tmpl_leave(tmpl_run *r, bool ok) { return r->left.depth++, ok; }

/* Whether a text of n more bytes behind b may be. */
static bool tmpl_fits(tmpl_run *r, size_t n, const buf *b) {
    size_t most = r->left.output_bytes, have = b ? b->n : 0;
    if (have <= most && n <= most - have) return tmpl_work(r, n);
    return tmpl_fail(r, "a text of more than %zu bytes", most);
}

/* n elements of `size` bytes, not cleared; NULL when the render has used up its memory. */
static void *tmpl_alloc(tmpl_run *r, size_t n, size_t size) {
    if (n >= r->memory / size) return tmpl_fail(r, "values need too much memory"), NULL;
    if (!tmpl_work(r, n * size / 16)) return NULL;
    r->memory -= MIN(n * size + 16, r->memory);
    return arena_alloc(&r->a, n * size);
}
static tmpl_items *tmpl_new_items(tmpl_run *r, size_t n) {
    tmpl_items *l = n < SIZE_MAX / 32 ? tmpl_alloc(r, sizeof(tmpl_items) + n * sizeof(tval), 1) : NULL;
    if (l) l->n = n;
    return l;
}
static tmpl_items *tmpl_pair(tmpl_run *r, tval a, tval b) {
    tmpl_items *l = tmpl_new_items(r, 2);
    if (l) l->v[0] = a, l->v[1] = b;
    return l;
}

static bool tmpl_put(tmpl_run *r, buf *b, str s) { return tmpl_fits(r, s.n, b) && (buf_str(b, s), true); }
static bool tmpl_put_c(tmpl_run *r, buf *b, const char *z) { return tmpl_put(r, b, str_c(z)); }

/* Ends the life of b: its text becomes a value, if all went well. */
static bool tmpl_finish(tmpl_run *r, buf *b, bool ok, tval *out) {
    char *p = ok ? tmpl_alloc(r, b->n + 1, 1) : NULL;
    if (p) memcpy(p, buf_view(b).p, b->n), *out = tv_str((str){p, b->n});
    buf_free(b);
    return p != NULL;
}

/* A value that an operation does not take, or an undefined one used for more than printing and asking. */
static bool tmpl_bad_type(tmpl_run *r, const char *what, tval v) {
    const char *type = tmpl_type_name(v.type);
    if (v.type != TV_UNDEFINED) return tmpl_fail(r, "%s does not take a value of type '%s'", what, type);
    if (!v.owner) return tmpl_fail(r, "'%.*s' is undefined", STRF(tv_text(v)));
    return tmpl_fail(r, "'%s' has no attribute or element '%.*s'", tmpl_type_name(v.owner), STRF(tv_text(v)));
}

/* ---- Text of values ---- */

static int tmpl_len_cp(str s) { /* code points */
    int n = 0;
    for (size_t i = 0; i < s.n; i++) n += (s.p[i] & 0xC0) != 0x80;
    return n;
}
static size_t tmpl_cp_bytes(str s, int64_t n) { /* bytes of the first n code points of s, at most all */
    size_t i = 0;
    while (i < s.n && n-- > 0)
        for (i++; i < s.n && (s.p[i] & 0xC0) == 0x80;) i++;
    return i;
}

/* A double as Python's repr: the fewest digits that give it back, a point always, an exponent from 1e16 and below 1e-4. */
static void tmpl_float_text(buf *b, double f) {
    char z[64];
    int digits = 0;
    if (!isfinite(f)) {
        buf_c(b, isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }
    do snprintf(z, sizeof z, "%.*e", digits, f);
    while (strtod(z, NULL) != f && ++digits < 17);
    int exponent = atoi(strchr(z, 'e') + 1);
    if (exponent >= -4 && exponent < 16) snprintf(z, sizeof z, "%.*f", MAX(digits - exponent, 1), f);
    const char *point = localeconv()->decimal_point, *at = strstr(z, point);
    buf_put(b, z, at ? (size_t)(at - z) : strlen(z));
    if (at) buf_char(b, '.'), buf_c(b, at + strlen(point));
}

static bool tmpl_put_quoted(tmpl_run *r, buf *b, str s) { /* Python's repr of a text */
    static const char named[] = "\n\r\t", as[] = "nrt";
    char quote = memchr(s.p, '\'', s.n) && !memchr(s.p, '"', s.n) ? '"' : '\'';
    if (!tmpl_fits(r, 4 * s.n, b)) return false;
    buf_char(b, quote);
    for (size_t i = 0; i < s.n; i++) {
        char c = s.p[i];
        const char *k = c ? strchr(named, c) : NULL;
        if (k) buf_char(b, '\\'), buf_char(b, as[k - named]);
        else if (c == quote || c == '\\') buf_char(b, '\\'), buf_char(b, c);
        else if ((unsigned char)c < 0x20 || c == 0x7F) buf_printf(b, "\\x%02x", c);
        else buf_char(b, c);
    }
    buf_char(b, quote);
    return true;
}

/* What Python's str(v) is, or with `quoted` repr(v), behind b. */
static bool tmpl_put_value(tmpl_run *r, buf *b, tval v, bool quoted) {
    char z[32];
    bool ok = true;
    switch (v.type) {
    case TV_UNDEFINED: return tmpl_put_c(r, b, quoted ? "Undefined" : "");
    case TV_NONE: return tmpl_put_c(r, b, "None");
    case TV_BOOL: return tmpl_put_c(r, b, v.i ? "True" : "False");
    case TV_INT: return snprintf(z, sizeof z, "%lld", (long long)v.i), tmpl_put_c(r, b, z);
    case TV_FLOAT: return tmpl_float_text(b, v.f), tmpl_fits(r, 0, b);
    case TV_STR: return quoted ? tmpl_put_quoted(r, b, tv_text(v)) : tmpl_put(r, b, tv_text(v));
    case TV_LIST: case TV_TUPLE: case TV_DICT: break;
    default: return tmpl_bad_type(r, "printing", v);
    }
    if (!tmpl_enter(r)) return false;
    buf_char(b, v.type == TV_LIST ? '[' : v.type == TV_TUPLE ? '(' : '{');
    for (size_t i = 0; v.type != TV_DICT && ok && i < v.list->n; i++)
        ok = (!i || tmpl_put_c(r, b, ", ")) && tmpl_put_value(r, b, v.list->v[i], true);
    if (v.type == TV_TUPLE && v.list->n == 1) buf_char(b, ',');
    for (size_t i = 0; v.type == TV_DICT && ok && i < v.dict->n; i++)
        ok = (!i || tmpl_put_c(r, b, ", ")) && tmpl_put_value(r, b, v.dict->at[i].key, true) && tmpl_put_c(r, b, ": ") &&
             tmpl_put_value(r, b, v.dict->at[i].v, true);
    buf_char(b, v.type == TV_LIST ? ']' : v.type == TV_TUPLE ? ')' : '}');
    return tmpl_leave(r, ok);
}

static bool tmpl_to_text(tmpl_run *r, tval v, tval *out) { /* str(v) as a value */
    buf b = {0};
    if (v.type == TV_STR) return *out = v, true;
    return tmpl_finish(r, &b, tmpl_put_value(r, &b, v, false), out);
}

/* ---- Equality, order, dicts ---- */

static bool tmpl_dict_find(tmpl_run *r, const tmpl_dict *d, tval key, tval *out);

static bool tmpl_equal(tmpl_run *r, tval a, tval b, bool *equal) {
    bool ok = true;
    *equal = false;
    if (!tmpl_work(r, 0)) return false;
    if (tv_is_integer(a) && tv_is_integer(b)) return *equal = a.i == b.i, true;
    if (tv_is_number(a) && tv_is_number(b)) return *equal = tv_double(a) == tv_double(b), true;
    if (a.type != b.type) return true;
    switch (a.type) {
    case TV_UNDEFINED: case TV_NONE: return *equal = true;
    case TV_STR: return *equal = str_eq(tv_text(a), tv_text(b)), a.n != b.n || tmpl_work(r, a.n);
    case TV_LIST: case TV_TUPLE: *equal = a.list->n == b.list->n; break;
    case TV_DICT: *equal = a.dict->n == b.dict->n; break;
    default: return *equal = a.list == b.list, true; /* the same object */
    }
    if (!tmpl_enter(r)) return false;
    for (size_t i = 0; tv_is_list(a) && ok && *equal && i < a.list->n; i++)
        ok = tmpl_equal(r, a.list->v[i], b.list->v[i], equal);
    for (size_t i = 0; a.type == TV_DICT && ok && *equal && i < a.dict->n; i++) {
        tval other;
        ok = tmpl_dict_find(r, b.dict, a.dict->at[i].key, &other) && tmpl_equal(r, a.dict->at[i].v, other, equal);
    }
    return tmpl_leave(r, ok);
}

/* *order: -1, 0 or 1. Numbers and texts have an order here; lists, which have one in Python, do not. */
static bool tmpl_order(tmpl_run *r, tval a, tval b, int *order) {
    if (tv_is_integer(a) && tv_is_integer(b)) return *order = (a.i > b.i) - (a.i < b.i), tmpl_work(r, 0);
    if (tv_is_number(a) && tv_is_number(b)) {
        double x = tv_double(a), y = tv_double(b);
        return *order = (x > y) - (x < y), tmpl_work(r, 0);
    }
    if (a.type == TV_STR && b.type == TV_STR) {
        size_t n = MIN(a.n, b.n);
        int c = n ? memcmp(a.s, b.s, n) : 0; /* the order of bytes is the order of code points */
        *order = c ? (c > 0) - (c < 0) : (a.n > b.n) - (a.n < b.n);
        return tmpl_work(r, n);
    }
    if (a.type == TV_UNDEFINED || b.type == TV_UNDEFINED) return tmpl_bad_type(r, "order", a.type == TV_UNDEFINED ? a : b);
    return tmpl_fail(r, "values of type '%s' and '%s' have no order", tmpl_type_name(a.type), tmpl_type_name(b.type));
}

/* Sorts `values` by `keys`, both in place; equal keys keep their order, with `reverse` too. By insertion: lists of a
 * template are short, and the steps bound the others. */
static bool tmpl_sort(tmpl_run *r, tmpl_items *keys, tmpl_items *values, bool reverse) {
    for (size_t i = 1; i < keys->n; i++) {
        tval key = keys->v[i], v = values->v[i];
        size_t to = i;
        for (int order = 0; to > 0; to--) {
            if (!tmpl_order(r, key, keys->v[to - 1], &order)) return false;
            if (reverse ? order <= 0 : order >= 0) break;
            keys->v[to] = keys->v[to - 1], values->v[to] = values->v[to - 1];
        }
        keys->v[to] = key, values->v[to] = v;
    }
    return true;
}

static bool tmpl_dict_index(tmpl_run *r, const tmpl_dict *d, tval key, size_t *i) { /* d->n if there is none */
    bool equal = false;
    for (*i = 0; *i < d->n; ++*i) {
        if (!tmpl_equal(r, d->at[*i].key, key, &equal)) return false;
        if (equal) break;
    }
    return true;
}
static bool tmpl_dict_find(tmpl_run *r, const tmpl_dict *d, tval key, tval *out) { /* TV_ABSENT if there is none */
    size_t i;
    if (!tmpl_dict_index(r, d, key, &i)) return false;
    return *out = i < d->n ? d->at[i].v : (tval){0}, true;
}

static bool tmpl_dict_set(tmpl_run *r, tmpl_dict *d, tval key, tval v) {
    size_t i;
    if (key.type == TV_LIST || key.type == TV_DICT) return tmpl_fail(r, "unhashable type: '%s'", tmpl_type_name(key.type));
    if (!tmpl_dict_index(r, d, key, &i)) return false;
    if (i < d->n) return d->at[i].v = v, true;
    if (d->n == d->cap) {
        size_t cap = MAX(d->cap * 2, (size_t)4);
        tmpl_member *at = tmpl_alloc(r, cap, sizeof *at);
        if (!at) return false;
        if (d->n) memcpy(at, d->at, d->n * sizeof *at);
        d->at = at, d->cap = cap;
    }
    d->at[d->n++] = (tmpl_member){key, v};
    return true;
}

static tmpl_dict *tmpl_new_dict(tmpl_run *r) {
    tmpl_dict *d = tmpl_alloc(r, 1, sizeof *d);
    if (d) *d = (tmpl_dict){0};
    return d;
}

typedef enum tmpl_part { PART_KEYS, PART_VALUES, PART_ITEMS } tmpl_part;

static tmpl_items *tmpl_dict_list(tmpl_run *r, const tmpl_dict *d, tmpl_part part) {
    tmpl_items *l = tmpl_new_items(r, d->n);
    for (size_t i = 0; l && i < d->n; i++) {
        tmpl_member m = d->at[i];
        tmpl_items *pair = part == PART_ITEMS ? tmpl_pair(r, m.key, m.v) : NULL;
        if (part == PART_ITEMS && !pair) return NULL;
        l->v[i] = pair ? tv_list(TV_TUPLE, pair) : part == PART_KEYS ? m.key : m.v;
    }
    return l;
}

/* ---- JSON ---- */

/* A value of the context. */
static bool tmpl_from_json(tmpl_run *r, const json *v, tval *out) {
    size_t i = 0;
    bool ok = tmpl_work(r, 0) && tmpl_enter(r);
    tmpl_items *l = ok && v->type == JSON_ARRAY ? tmpl_new_items(r, v->n) : NULL;
    tmpl_dict *d = ok && v->type == JSON_OBJECT ? tmpl_new_dict(r) : NULL;
    switch (v->type) {
    case JSON_NULL: *out = tv_none(); break;
    case JSON_FALSE: case JSON_TRUE: *out = tv_bool(v->type == JSON_TRUE); break;
    case JSON_NUMBER: *out = v->exact ? tv_int(v->i) : tv_float(v->f); break;
    case JSON_STRING: *out = tv_str(json_str(v)); break;
    case JSON_ARRAY:
        ok = ok && l;
        JSON_EACH(it, v) ok = ok && tmpl_from_json(r, it, &l->v[i++]);
        *out = tv_list(TV_LIST, l);
        break;
    default:
        ok = ok && d;
        JSON_MEMBERS(key, v) {
            tval member;
            ok = ok && tmpl_from_json(r, key + 1, &member) && tmpl_dict_set(r, d, tv_str(json_str(key)), member);
        }
        *out = (tval){.type = TV_DICT, .dict = d};
    }
    return tmpl_leave(r, ok);
}

typedef struct tmpl_json_style {
    bool ascii, sort_keys, lines; /* lines: every element on its own line */
    int64_t indent;               /* spaces of one level */
    str comma, colon;
} tmpl_json_style;

static bool tmpl_put_json_str(tmpl_run *r, buf *b, str s, bool ascii) {
    static const char named[] = "\"\\\n\r\t\f\b", as[] = "\"\\nrtfb";
    int n;
    if (!tmpl_fits(r, 6 * s.n, b)) return false;
    buf_char(b, '"');
    for (size_t i = 0; i < s.n; i += (size_t)n) {
        uint32_t c = uni_next(s.p + i, &n);
        const char *k = c && c < 0x80 ? strchr(named, (int)c) : NULL;
        if (k) buf_char(b, '\\'), buf_char(b, as[k - named]);
        else if (c < 0x20 || (ascii && c >= 0x7F && c < 0x10000)) buf_printf(b, "\\u%04x", c);
        else if (ascii && c >= 0x10000)
            buf_printf(b, "\\u%04x\\u%04x", 0xD800 + ((c - 0x10000) >> 10), 0xDC00 + (c & 0x3FF));
        else buf_put(b, s.p + i, (size_t)n);
    }
    buf_char(b, '"');
    return true;
}

static bool tmpl_json_line(tmpl_run *r, buf *b, const tmpl_json_style *style, int level) {
    if (!style->lines) return true;
    if (!tmpl_put_c(r, b, "\n")) return false;
    for (int64_t i = 0; i < level * style->indent; i++)
        if (!tmpl_put_c(r, b, " ")) return false;
    return true;
}

static bool tmpl_put_json(tmpl_run *r, buf *b, tval v, const tmpl_json_style *style, int level);

static bool tmpl_put_json_key(tmpl_run *r, buf *b, tval key, const tmpl_json_style *style) {
    if (key.type == TV_STR) return tmpl_put_json_str(r, b, tv_text(key), style->ascii);
    if (key.type != TV_NONE && !tv_is_number(key)) return tmpl_bad_type(r, "a JSON member name", key);
    return tmpl_put_c(r, b, "\"") && tmpl_put_json(r, b, key, style, 0) && tmpl_put_c(r, b, "\"");
}

/* json.dumps(v) as Hugging Face's tojson calls it. */
static bool tmpl_put_json(tmpl_run *r, buf *b, tval v, const tmpl_json_style *style, int level) {
    tmpl_items *keys = NULL, *l = v.list;
    switch (v.type) {
    case TV_NONE: return tmpl_put_c(r, b, "null");
    case TV_BOOL: return tmpl_put_c(r, b, v.i ? "true" : "false");
    case TV_FLOAT: if (!isfinite(v.f)) return tmpl_fail(r, "tojson: a number without JSON"); /* fall through */
    case TV_INT: return tmpl_put_value(r, b, v, false);
    case TV_STR: return tmpl_put_json_str(r, b, tv_text(v), style->ascii);
    case TV_LIST: case TV_TUPLE: break;
    case TV_DICT:
        keys = tmpl_dict_list(r, v.dict, PART_KEYS), l = keys ? tmpl_dict_list(r, v.dict, PART_VALUES) : NULL;
        if (!l || (style->sort_keys && !tmpl_sort(r, keys, l, false))) return false;
        break;
    default: return tmpl_fail(r, "tojson: a value of type '%s' has no JSON", tmpl_type_name(v.type));
    }
    bool ok = tmpl_enter(r);
    buf_char(b, keys ? '{' : '[');
    for (size_t i = 0; ok && i < l->n; i++) {
        ok = (!i || tmpl_put(r, b, style->comma)) && tmpl_json_line(r, b, style, level + 1);
        if (keys) ok = ok && tmpl_put_json_key(r, b, keys->v[i], style) && tmpl_put(r, b, style->colon);
        ok = ok && tmpl_put_json(r, b, l->v[i], style, level + 1);
    }
    if (ok && l->n) ok = tmpl_json_line(r, b, style, level);
    buf_char(b, keys ? '}' : ']');
    return tmpl_leave(r, ok);
}

/* ---- Elements ---- */

/* What `for` walks in v, as a list; a generator is used up by it. */
static bool tmpl_walk(tmpl_run *r, tval v, tmpl_items **out) {
    switch (v.type) {
    case TV_LIST: case TV_TUPLE: *out = v.list; return true;
    case TV_UNDEFINED: return (*out = tmpl_new_items(r, 0)) != NULL;
    case TV_DICT: return (*out = tmpl_dict_list(r, v.dict, PART_KEYS)) != NULL;
    case TV_GENERATOR:
        if (!(*out = tmpl_new_items(r, v.list->n))) return false;
        memcpy((*out)->v, v.list->v, v.list->n * sizeof(tval));
        v.list->n = 0;
        return true;
    case TV_STR:
        if (!(*out = tmpl_new_items(r, (size_t)tmpl_len_cp(tv_text(v))))) return false;
        for (size_t i = 0, n, at = 0; i < (*out)->n; i++, at += n) {
            n = tmpl_cp_bytes((str){v.s + at, v.n - at}, 1);
            (*out)->v[i] = tv_str((str){v.s + at, n});
        }
        return true;
    default: return tmpl_fail(r, "'%s' object is not iterable", tmpl_type_name(v.type));
    }
}

static int64_t tmpl_length(tval v) { /* len(v), -1 if it has none */
    switch (v.type) {
    case TV_UNDEFINED: return 0;
    case TV_STR: return tmpl_len_cp(tv_text(v));
    case TV_LIST: case TV_TUPLE: return (int64_t)v.list->n;
    case TV_DICT: return (int64_t)v.dict->n;
    default: return -1;
    }
}

/* The code points from..to of a text. */
static tval tmpl_substring(tval v, int64_t from, int64_t to) {
    str s = tv_text(v);
    s = str_sub(s, tmpl_cp_bytes(s, from), s.n);
    return tv_str(str_sub(s, 0, tmpl_cp_bytes(s, to - from)));
}

/* v[key] as Python has it; *out TV_ABSENT: there is no such element. */
static bool tmpl_element(tmpl_run *r, tval v, tval key, tval *out) {
    *out = (tval){0};
    if (v.type == TV_DICT) return tmpl_dict_find(r, v.dict, key, out);
    if (!tv_is_integer(key) || (v.type != TV_STR && !tv_is_list(v))) return true;
    int64_t n = tmpl_length(v), i = key.i < 0 ? key.i + n : key.i;
    if (i < 0 || i >= n) return true;
    *out = v.type == TV_STR ? tmpl_substring(v, i, i + 1) : v.list->v[i];
    return tmpl_work(r, v.type == TV_STR ? v.n : 0);
}

/* ---- Operators ---- */

/* a + b for texts. The latest long result has room behind it: when it is the left side again, it grows where it is, so that
 * building a text piece by piece is linear. Its earlier, shorter self stays as it was. */
static bool tmpl_concat(tmpl_run *r, str a, str b, tval *out) {
    buf before = {.n = a.n};
    if (!tmpl_fits(r, b.n, &before)) return false;
    if (a.n && a.p == r->last_text && a.n == r->last_n && r->last_cap - a.n >= b.n) {
        memcpy(r->last_text + a.n, b.p, b.n);
    } else {
        size_t cap = a.n + b.n < 1024 ? a.n + b.n : 2 * (a.n + b.n);
        char *p = tmpl_alloc(r, cap + 1, 1);
        if (!p) return false;
        if (a.n) memcpy(p, a.p, a.n);
        if (b.n) memcpy(p + a.n, b.p, b.n);
        a.p = p;
        if (cap > a.n + b.n) r->last_text = p, r->last_cap = cap;
    }
    if (a.p == r->last_text) r->last_n = a.n + b.n;
    *out = tv_str((str){a.p, a.n + b.n});
    return true;
}

/* &, <, >, ' and " as HTML entities, once: the result is safe. */
static bool tmpl_escape_html(tmpl_run *r, tval v, tval *out) {
    static const char *const entities[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    static const char plain[] = "&<>'\"";
    buf b = {0};
    if (v.safe) return *out = v, true;
    bool ok = true;
    for (size_t i = 0; ok && i < v.n; i++) {
        const char *k = v.s[i] ? strchr(plain, v.s[i]) : NULL;
        ok = k ? tmpl_put_c(r, &b, entities[k - plain]) : tmpl_put(r, &b, (str){v.s + i, 1});
    }
    return tmpl_finish(r, &b, ok, out) && (out->safe = true);
}

static bool tmpl_add_texts(tmpl_run *r, tval a, tval b, tval *out) {
    bool safe = a.safe || b.safe;
    if (safe && (!tmpl_escape_html(r, a, &a) || !tmpl_escape_html(r, b, &b))) return false;
    if (!tmpl_concat(r, tv_text(a), tv_text(b), out)) return false;
    return out->safe = safe, true;
}

static bool tmpl_repeat(tmpl_run *r, str s, int64_t n, tval *out) { /* a text n times */
    buf b = {0};
    bool ok = true;
    for (int64_t i = 0; ok && s.n && i < n; i++) ok = tmpl_put(r, &b, s);
    return tmpl_finish(r, &b, ok, out);
}

static bool tmpl_join_lists(tmpl_run *r, tval a, tval b, tval *out) {
    tmpl_items *l = tmpl_new_items(r, a.list->n + b.list->n);
    if (!l) return false;
    memcpy(l->v, a.list->v, a.list->n * sizeof(tval));
    memcpy(l->v + a.list->n, b.list->v, b.list->n * sizeof(tval));
    return *out = tv_list(a.type, l), true;
}

static bool tmpl_int_op(tmpl_run *r, int op, int64_t a, int64_t b, tval *out) {
    int64_t v = 0;
    bool over = false;
    if ((op == '/' || op == OP_FLOOR || op == '%') && b == 0) return tmpl_fail(r, "division by zero");
    switch (op) {
    case '+': over = __builtin_add_overflow(a, b, &v); break;
    case '-': over = __builtin_sub_overflow(a, b, &v); break;
    case '*': over = __builtin_mul_overflow(a, b, &v); break;
    case '/': return *out = tv_float((double)a / (double)b), true;
    case OP_FLOOR: /* rounded down */
        if (b == -1) over = __builtin_sub_overflow((int64_t)0, a, &v);
        else v = a / b - (a % b && (a % b < 0) != (b < 0));
        break;
    default: /* %: the remainder has b's sign */
        v = b == -1 ? 0 : a % b;
        if (v && (v < 0) != (b < 0)) v += b;
    }
    return over ? tmpl_fail(r, "an integer beyond 64 bits") : (*out = tv_int(v), true);
}

static bool tmpl_float_op(tmpl_run *r, int op, double a, double b, tval *out) {
    if ((op == '/' || op == OP_FLOOR || op == '%') && b == 0) return tmpl_fail(r, "division by zero");
    switch (op) {
    case '+': a += b; break;
    case '-': a -= b; break;
    case '*': a *= b; break;
    case '/': a /= b; break;
    case OP_FLOOR: a = floor(a / b); break;
    default:
        a = fmod(a, b);
        if (a != 0 && (a < 0) != (b < 0)) a += b;
    }
    return *out = tv_float(a), true;
}

static bool tmpl_arithmetic(tmpl_run *r, int op, tval a, tval b, tval *out) {
    if (tv_is_integer(a) && tv_is_integer(b)) return tmpl_int_op(r, op, a.i, b.i, out);
    if (tv_is_number(a) && tv_is_number(b)) return tmpl_float_op(r, op, tv_double(a), tv_double(b), out);
    if (op == '+' && a.type == TV_STR && b.type == TV_STR) return tmpl_add_texts(r, a, b, out);
    if (op == '+' && tv_is_list(a) && a.type == b.type) return tmpl_join_lists(r, a, b, out);
    if (op == '*' && a.type == TV_STR && tv_is_integer(b)) return tmpl_repeat(r, tv_text(a), b.i, out);
    if (op == '*' && tv_is_integer(a) && b.type == TV_STR) return tmpl_repeat(r, tv_text(b), a.i, out);
    char z[3] = {(char)op, (char)(op >> 8), 0};
    if (a.type == TV_UNDEFINED || b.type == TV_UNDEFINED) return tmpl_bad_type(r, z, a.type == TV_UNDEFINED ? a : b);
    return tmpl_fail(r, "'%s' does not go with '%s' and '%s'", z, tmpl_type_name(a.type), tmpl_type_name(b.type));
}

static bool tmpl_contains(tmpl_run *r, tval needle, tval in, bool *yes) {
    tmpl_items *l;
    tval found;
    *yes = false;
    if (in.type == TV_DICT) return tmpl_dict_find(r, in.dict, needle, &found) && (*yes = found.type != TV_ABSENT, true);
    if (in.type == TV_STR) {
        if (needle.type != TV_STR) return tmpl_bad_type(r, "'in' a text", needle);
        *yes = str_find(tv_text(in), tv_text(needle), 0) >= 0;
        return tmpl_work(r, in.n);
    }
    if (!tmpl_walk(r, in, &l)) return false;
    for (size_t i = 0; i < l->n && !*yes; i++)
        if (!tmpl_equal(r, l->v[i], needle, yes)) return false;
    return true;
}

/* a op b for every operator but `and` and `or`, which do not always look at b. */
static bool tmpl_binary(tmpl_run *r, int op, tval a, tval b, tval *out) {
    bool yes = false, ok;
    int order = 0;
    switch (op) {
    case OP_EQ: case OP_NE: ok = tmpl_equal(r, a, b, &yes); break;
    case OP_IN: case OP_NOT_IN: ok = tmpl_contains(r, a, b, &yes); break;
    case '<': ok = tmpl_order(r, a, b, &order), yes = order < 0; break;
    case '>': ok = tmpl_order(r, a, b, &order), yes = order > 0; break;
    case OP_LE: ok = tmpl_order(r, a, b, &order), yes = order <= 0; break;
    case OP_GE: ok = tmpl_order(r, a, b, &order), yes = order >= 0; break;
    case '~': return tmpl_to_text(r, a, &a) && tmpl_to_text(r, b, &b) && tmpl_concat(r, tv_text(a), tv_text(b), out);
    default: return tmpl_arithmetic(r, op, a, b, out);
    }
    *out = tv_bool(yes != (op == OP_NE || op == OP_NOT_IN));
    return ok;
}

/* ---- Functions of texts and numbers ---- */

enum { TMPL_ARGS = 4 }; /* parameters of a filter, test, method or function at most */

typedef struct tmpl_args { /* of one call */
    tval self;   /* the filtered or tested value, the method's object */
    tval *pos;   /* [n_pos] as written */
    tval *named; /* [n_named] given as name=value, with their names */
    str *names;
    int n_pos, n_named;
    tval a[TMPL_ARGS]; /* bound to the parameters; TV_ABSENT: not given */
    int op;            /* which of several that share a function */
} tmpl_args;

static bool tmpl_f_string(tmpl_run *r, tmpl_args *c, tval *out) { return tmpl_to_text(r, c->self, out); }

static uint32_t tmpl_lower_cp(uint32_t c) {
    return (c >= 'A' && c <= 'Z') || (c >= 0xC0 && c <= 0xDE && c != 0xD7) ? c + 32 : c;
}
static uint32_t tmpl_upper_cp(uint32_t c) { return c >= 32 && tmpl_lower_cp(c - 32) == c ? c - 32 : c; }

enum { CASE_LOWER, CASE_UPPER, CASE_CAPITAL, CASE_TITLE, CASE_TITLE_METHOD };

/* CASE_CAPITAL: the first letter is large. CASE_TITLE, the filter: so is one behind a space and "-([{<"; the method: one
 * behind anything but a letter. */
static bool tmpl_f_case(tmpl_run *r, tmpl_args *c, tval *out) {
    tval v;
    buf b = {0};
    if (!tmpl_to_text(r, c->self, &v)) return false;
    str s = tv_text(v);
    bool large = c->op != CASE_LOWER, ok = tmpl_fits(r, s.n, &b);
    int n = 0;
    for (size_t i = 0; ok && i < s.n; i += (size_t)n) {
        char utf8[4];
        uint32_t u = uni_next(s.p + i, &n), lower = tmpl_lower_cp(u), upper = tmpl_upper_cp(u);
        buf_put(&b, utf8, (size_t)utf8_put(utf8, large ? upper : lower));
        if (c->op == CASE_CAPITAL) large = false;
        if (c->op == CASE_TITLE) large = tmpl_space(s, i) || (u && u < 0x80 && strchr("-([{<", (int)u));
        if (c->op == CASE_TITLE_METHOD) large = lower == upper;
    }
    return tmpl_finish(r, &b, ok, out);
}

enum { STRIP_LEFT = 1, STRIP_RIGHT = 2 };

static bool tmpl_f_strip(tmpl_run *r, tmpl_args *c, tval *out) { /* chars: which, else white space */
    tval v;
    bool left = c->op & STRIP_LEFT, right = c->op & STRIP_RIGHT;
    if (!tmpl_to_text(r, c->self, &v) || !tmpl_work(r, v.n)) return false;
    str s = tv_text(v), set = tv_text(c->a[0]);
    if (c->a[0].type <= TV_NONE) return *out = tv_str(tmpl_trim(s, left, right)), true;
    if (c->a[0].type != TV_STR) return tmpl_bad_type(r, "strip", c->a[0]);
    for (size_t n; left && s.n; s = str_sub(s, n, s.n)) {
        n = tmpl_cp_bytes(s, 1);
        if (!tmpl_work(r, set.n)) return false;
        if (str_find(set, str_sub(s, 0, n), 0) < 0) break;
    }
    for (; right && s.n; s.n = tmpl_last_cp(s)) {
        if (!tmpl_work(r, set.n)) return false;
        if (str_find(set, str_sub(s, tmpl_last_cp(s), s.n), 0) < 0) break;
    }
    return *out = tv_str(s), true;
}

static bool tmpl_f_replace(tmpl_run *r, tmpl_args *c, tval *out) { /* old new count */
    tval v[3];
    if (!tmpl_to_text(r, c->self, &v[0]) || !tmpl_to_text(r, c->a[0], &v[1]) || !tmpl_to_text(r, c->a[1], &v[2]))
        return false;
    str s = tv_text(v[0]), old = tv_text(v[1]);
    buf b = {0};
    bool ok = tmpl_work(r, s.n) && (old.n || tmpl_fail(r, "replace: empty text"));
    int64_t count = tv_is_integer(c->a[2]) ? c->a[2].i : -1; /* negative: all */
    for (ptrdiff_t at; ok && count-- != 0 && (at = str_find(s, old, 0)) >= 0;) {
        ok = tmpl_put(r, &b, str_sub(s, 0, (size_t)at)) && tmpl_put(r, &b, tv_text(v[2]));
        s = str_sub(s, (size_t)at + old.n, s.n);
    }
    return tmpl_finish(r, &b, ok && tmpl_put(r, &b, s), out);
}

/* The next part of s from *at on, which moves behind its separator; without a separator parts stand between white space.
 * False behind the last. */
static bool tmpl_next_part(str s, const str *sep, size_t *at, str *part) {
    size_t from = sep ? *at : tmpl_skip_space(s, *at), to = from;
    if (sep ? from > s.n : from >= s.n) return false;
    ptrdiff_t found = sep ? str_find(s, *sep, from) : -1;
    if (sep) to = found < 0 ? s.n : (size_t)found;
    else while (to < s.n && !tmpl_space(s, to)) to++;
    *part = str_sub(s, from, to);
    *at = to + (sep ? sep->n : 0);
    if (sep && found < 0) *at = s.n + 1;
    return true;
}

static bool tmpl_f_split(tmpl_run *r, tmpl_args *c, tval *out) { /* sep maxsplit; op 1: rsplit */
    str s = tv_text(c->self), sep = tv_text(c->a[0]), part;
    bool blank = c->a[0].type <= TV_NONE;
    size_t n = 0, at = 0, most = tv_is_integer(c->a[1]) && c->a[1].i >= 0 ? (size_t)c->a[1].i + 1 : SIZE_MAX;
    if (!blank && c->a[0].type != TV_STR) return tmpl_bad_type(r, "split", c->a[0]);
    if (!blank && !sep.n) return tmpl_fail(r, "split: empty separator");
    if (!tmpl_work(r, s.n)) return false;
    while (tmpl_next_part(s, blank ? NULL : &sep, &at, &part)) n++;
    tmpl_items *l = tmpl_new_items(r, n);
    if (!l) return false;
    for (n = at = 0; tmpl_next_part(s, blank ? NULL : &sep, &at, &part); n++) l->v[n] = tv_str(part);
    *out = tv_list(TV_LIST, l);
    if (n <= most) return true;
    if (!c->op) { /* the last part is all that is left */
        l->n = most;
        l->v[most - 1] = tv_str((str){l->v[most - 1].s, (size_t)(s.p + s.n - l->v[most - 1].s)});
        return true;
    }
    size_t extra = n - most; /* rsplit: the first part is */
    l->v[extra] = tv_str((str){s.p, (size_t)(l->v[extra].s - s.p) + l->v[extra].n});
    memmove(l->v, l->v + extra, most * sizeof(tval));
    l->n = most;
    return true;
}

enum { AFFIX_STARTS, AFFIX_ENDS, AFFIX_CUT_START, AFFIX_CUT_END };

static bool tmpl_f_affix(tmpl_run *r, tmpl_args *c, tval *out) { /* startswith, endswith, removeprefix, removesuffix */
    if (c->a[0].type != TV_STR) return tmpl_bad_type(r, "an affix", c->a[0]);
    str s = tv_text(c->self), affix = tv_text(c->a[0]);
    bool end = c->op == AFFIX_ENDS || c->op == AFFIX_CUT_END, has = (end ? str_ends : str_starts)(s, affix);
    if (c->op <= AFFIX_ENDS) *out = tv_bool(has);
    else *out = tv_str(!has ? s : end ? str_sub(s, 0, s.n - affix.n) : str_sub(s, affix.n, s.n));
    return tmpl_work(r, affix.n);
}

static bool tmpl_f_find(tmpl_run *r, tmpl_args *c, tval *out) {
    if (c->a[0].type != TV_STR) return tmpl_bad_type(r, "find", c->a[0]);
    ptrdiff_t at = str_find(tv_text(c->self), tv_text(c->a[0]), 0);
    return *out = tv_int(at < 0 ? -1 : tmpl_len_cp((str){c->self.s, (size_t)at})), tmpl_work(r, c->self.n);
}

static bool tmpl_f_safe(tmpl_run *r, tmpl_args *c, tval *out) {
    return tmpl_to_text(r, c->self, out) && (out->safe = true);
}
static bool tmpl_f_escape(tmpl_run *r, tmpl_args *c, tval *out) {
    return tmpl_to_text(r, c->self, out) && tmpl_escape_html(r, *out, out);
}

static bool tmpl_f_indent(tmpl_run *r, tmpl_args *c, tval *out) { /* width first blank: also the first, also empty lines */
    buf b = {0};
    str line, lf = STR("\n");
    int64_t width = c->a[0].type ? c->a[0].i : 4;
    if (c->self.type != TV_STR) return tmpl_bad_type(r, "indent", c->self);
    if (c->a[0].type && !tv_is_integer(c->a[0])) return tmpl_bad_type(r, "indent", c->a[0]);
    bool ok = true, first = true;
    for (size_t at = 0; ok && tmpl_next_part(tv_text(c->self), &lf, &at, &line); first = false) {
        bool wide = first ? tv_true(c->a[1]) : line.n || tv_true(c->a[2]);
        if (!first) ok = tmpl_put(r, &b, lf);
        for (int64_t i = 0; ok && wide && i < width; i++) ok = tmpl_put_c(r, &b, " ");
        ok = ok && tmpl_put(r, &b, line);
    }
    return tmpl_finish(r, &b, ok, out);
}

static bool tmpl_f_tojson(tmpl_run *r, tmpl_args *c, tval *out) { /* ensure_ascii indent separators sort_keys */
    tmpl_json_style style = {.ascii = tv_true(c->a[0]), .sort_keys = tv_true(c->a[3]), .comma = STR(", "),
        .colon = STR(": ")};
    buf b = {0};
    if (c->a[1].type > TV_NONE) {
        if (!tv_is_integer(c->a[1])) return tmpl_bad_type(r, "indent=", c->a[1]);
        style.lines = true, style.comma = STR(","), style.indent = MAX(0, MIN(c->a[1].i, 100));
    }
    if (c->a[2].type > TV_NONE) {
        const tmpl_items *l = tv_is_list(c->a[2]) ? c->a[2].list : NULL;
        if (!l || l->n != 2 || l->v[0].type != TV_STR || l->v[1].type != TV_STR)
            return tmpl_fail(r, "tojson: separators is a pair of texts");
        style.comma = tv_text(l->v[0]), style.colon = tv_text(l->v[1]);
    }
    return tmpl_finish(r, &b, tmpl_put_json(r, &b, c->self, &style, 0), out);
}

/* Text that JSON has as a number as a TV_INT or TV_FLOAT. *out stays as it is if it is none. */
static bool tmpl_parse_number(tmpl_run *r, str s, tval *out) {
    toka_err e;
    arena a = {0};
    if (!tmpl_work(r, s.n)) return false;
    const json *number = json_parse(&a, tmpl_trim(s, true, true), json_trusted, &e);
    if (json_is(number, JSON_NUMBER)) *out = number->exact ? tv_int(number->i) : tv_float(number->f);
    arena_free(&a);
    return true;
}

static bool tmpl_f_number(tmpl_run *r, tmpl_args *c, tval *out) { /* default; op TV_INT or TV_FLOAT */
    tval v = c->self;
    if (v.type == TV_UNDEFINED) return tmpl_bad_type(r, "int", v);
    if (v.type == TV_STR && !tmpl_parse_number(r, tv_text(v), &v)) return false;
    *out = c->a[0].type ? c->a[0] : c->op == TV_INT ? tv_int(0) : tv_float(0);
    if (!tv_is_number(v)) return true;
    if (c->op == TV_FLOAT) return *out = tv_float(tv_double(v)), true;
    if (v.type == TV_FLOAT && !(v.f >= -0x1p63 && v.f < 0x1p63)) return tmpl_fail(r, "int: a number beyond 64 bits");
    return *out = tv_int(v.type == TV_FLOAT ? (int64_t)v.f : v.i), true;
}

/* ===========================================================================
 * MARK: 9. Chat template: evaluation [pure]
 * tmpl_render walks the parser's tree with a context (a JSON object) and appends the text to a buf; results are those
 * of Python's Jinja2 3.1 as Hugging Face's apply_chat_template sets it up, byte for byte, and where Jinja raises, this
 * mostly fails.
 *
 * Order of the chapter: filters of lists; tests; global functions; the table of all functions; attributes; scopes;
 * calls; expressions; statements; loops; tmpl_render. A filter, method or global function is one line of tmpl_fns; one that
 * is not there is an error when a template comes to it.
 *
 * Always: templates are not trusted. Every node evaluated is a step and every recursion is counted; the first error ends
 * the render. A chain of scopes holds the variables of loop bodies, macros and blocks; a value cannot be changed.
 *
 * Not as in Python: map, select and the like work at once, not when walked; loop.last and loop.length put the condition of
 * the loop to all that is left; letter case is known for ASCII and Latin-1; only `+` knows of safe texts.
 * =========================================================================== */

typedef struct tmpl_var {
    int id;
    tval v;
} tmpl_var;

typedef struct tmpl_scope {
    struct tmpl_scope *outer;
    tmpl_var *vars;
    int n, cap;
} tmpl_scope;

typedef struct tmpl_macro {
    const tmpl_node *node; /* TN_MACRO */
    tmpl_scope *scope;     /* where it was defined */
} tmpl_macro;

typedef struct tmpl_loop {
    tmpl_items *items;
    size_t at;             /* next candidate in items */
    const tmpl_node *node; /* TN_FOR */
    tmpl_scope *scope;     /* outside of the loop */
    int64_t index0;
    bool settled;          /* all of items from `at` on have passed node->d */
    tval before, now;
} tmpl_loop;

typedef enum tmpl_owner { OF_FILTER, OF_TEXT, OF_DICT, OF_ALL } tmpl_owner; /* of texts, of dicts: methods */

typedef struct tmpl_fn {
    tmpl_owner of;
    const char *name;
    const char *params; /* names, separated by spaces; "*": takes pos and named as they are */
    int need;           /* that many of them must be given */
    bool (*run)(tmpl_run *r, tmpl_args *c, tval *out);
    int op;
} tmpl_fn;

typedef struct tmpl_method {
    tval self;
    const tmpl_fn *fn;
} tmpl_method;

static bool tmpl_attr_path(tmpl_run *r, tval v, tval path, tval otherwise, tval *out);
static bool tmpl_apply_filter(tmpl_run *r, str name, tmpl_args *c, tval *out);
static bool tmpl_apply_test(tmpl_run *r, str name, const tmpl_args *c, tval *out);

/* ---- Lists ---- */

static bool tmpl_f_length(tmpl_run *r, tmpl_args *c, tval *out) {
    int64_t n = tmpl_length(c->self);
    if (n < 0) return tmpl_bad_type(r, "length", c->self);
    return *out = tv_int(n), tmpl_work(r, c->self.type == TV_STR ? c->self.n : 0);
}

static bool tmpl_f_default(tmpl_run *r, tmpl_args *c, tval *out) { /* default_value boolean */
    bool use = c->self.type == TV_UNDEFINED || (tv_true(c->a[1]) && !tv_true(c->self));
    *out = !use ? c->self : c->a[0].type ? c->a[0] : tv_str(STR(""));
    return tmpl_work(r, 0);
}

static bool tmpl_join(tmpl_run *r, const tmpl_items *l, str between, tval attribute, tval *out) {
    buf b = {0};
    bool ok = true;
    for (size_t i = 0; ok && i < l->n; i++) {
        tval v;
        ok = (!i || tmpl_put(r, &b, between)) && tmpl_attr_path(r, l->v[i], attribute, (tval){0}, &v) &&
             tmpl_put_value(r, &b, v, false);
    }
    return tmpl_finish(r, &b, ok, out);
}
static bool tmpl_f_join(tmpl_run *r, tmpl_args *c, tval *out) { /* list|join(text, attribute); op 1: text.join(list) */
    tmpl_items *l;
    tval between = c->op ? c->self : c->a[0], list = c->op ? c->a[0] : c->self;
    if (!between.type) between = tv_str(STR(""));
    if (!tmpl_walk(r, list, &l) || !tmpl_to_text(r, between, &between)) return false;
    for (size_t i = 0; c->op && i < l->n; i++)
        if (l->v[i].type != TV_STR) return tmpl_bad_type(r, "join", l->v[i]);
    return tmpl_join(r, l, tv_text(between), c->op ? (tval){0} : c->a[1], out);
}

enum { LIST_ALL, LIST_FIRST, LIST_LAST, LIST_REVERSED, LIST_ITEMS };

static bool tmpl_f_list(tmpl_run *r, tmpl_args *c, tval *out) { /* list, first, last, reverse, items */
    tmpl_items *l, *back;
    if (c->op == LIST_ITEMS && c->self.type == TV_DICT)
        return (l = tmpl_dict_list(r, c->self.dict, PART_ITEMS)) && (*out = tv_list(TV_GENERATOR, l), true);
    if (c->op == LIST_ITEMS && c->self.type != TV_UNDEFINED) return tmpl_bad_type(r, "items", c->self);
    if (!tmpl_walk(r, c->self, &l)) return false;
    switch (c->op) {
    case LIST_FIRST: return *out = l->n ? l->v[0] : tv_undefined(STR("first"), TV_LIST), true;
    case LIST_LAST: return *out = l->n ? l->v[l->n - 1] : tv_undefined(STR("last"), TV_LIST), true;
    case LIST_REVERSED:
        if (!(back = tmpl_new_items(r, l->n))) return false;
        for (size_t i = 0; i < l->n; i++) back->v[i] = l->v[l->n - 1 - i];
        if (c->self.type == TV_STR) return tmpl_join(r, back, STR(""), (tval){0}, out);
        return *out = tv_list(TV_GENERATOR, back), true;
    default: return *out = tv_list(TV_LIST, l), true;
    }
}

/* A copy of what v holds and the keys it is compared by: an attribute, texts without regard to case unless asked. */
static bool tmpl_sort_keys(tmpl_run *r, tval v, tval attribute, tval case_sensitive, tmpl_items **l, tmpl_items **keys) {
    tmpl_items *from;
    if (!tmpl_walk(r, v, &from) || !(*l = tmpl_new_items(r, from->n)) || !(*keys = tmpl_new_items(r, from->n)))
        return false;
    for (size_t i = 0; i < from->n; i++) {
        tmpl_args lower = {.op = CASE_LOWER};
        (*l)->v[i] = from->v[i];
        if (!tmpl_attr_path(r, from->v[i], attribute, (tval){0}, &lower.self)) return false;
        (*keys)->v[i] = lower.self;
        if (lower.self.type == TV_STR && !tv_true(case_sensitive) && !tmpl_f_case(r, &lower, &(*keys)->v[i])) return false;
    }
    return true;
}

static bool tmpl_f_sort(tmpl_run *r, tmpl_args *c, tval *out) { /* reverse case_sensitive attribute */
    tmpl_items *l, *keys;
    if (!tmpl_sort_keys(r, c->self, c->a[2], c->a[1], &l, &keys)) return false;
    return *out = tv_list(TV_LIST, l), tmpl_sort(r, keys, l, tv_true(c->a[0]));
}

static bool tmpl_f_dictsort(tmpl_run *r, tmpl_args *c, tval *out) { /* case_sensitive by reverse */
    tmpl_items *l, *keys, *pairs;
    if (c->self.type != TV_DICT) return tmpl_bad_type(r, "dictsort", c->self);
    bool by_value = c->a[1].type == TV_STR && str_is(tv_text(c->a[1]), "value");
    if (!(pairs = tmpl_dict_list(r, c->self.dict, PART_ITEMS))) return false;
    if (!tmpl_sort_keys(r, tv_list(TV_LIST, pairs), tv_int(by_value), c->a[0], &l, &keys)) return false;
    return *out = tv_list(TV_LIST, l), tmpl_sort(r, keys, l, tv_true(c->a[2]));
}

static bool tmpl_f_unique(tmpl_run *r, tmpl_args *c, tval *out) { /* case_sensitive attribute */
    tmpl_items *l, *keys;
    size_t n = 0;
    if (!tmpl_sort_keys(r, c->self, c->a[1], c->a[0], &l, &keys)) return false;
    for (size_t i = 0, total = l->n; i < total; i++) {
        bool seen;
        keys->n = n;
        if (!tmpl_contains(r, keys->v[i], tv_list(TV_LIST, keys), &seen)) return false;
        if (!seen) keys->v[n] = keys->v[i], l->v[n++] = l->v[i];
    }
    l->n = n;
    return *out = tv_list(TV_GENERATOR, l), true;
}

/* What v holds; nothing for what is false, even if it is no list. */
static bool tmpl_walk_any(tmpl_run *r, tval v, tmpl_items **l) {
    return tmpl_walk(r, tv_true(v) ? v : tv_undefined(STR(""), 0), l);
}

static tval tmpl_named_arg(const tmpl_args *c, str name) {
    for (int i = 0; i < c->n_named; i++)
        if (str_eq(c->names[i], name)) return c->named[i];
    return (tval){0};
}

/* Runs the filter or test whose name is argument `from` on v, with the arguments behind it. */
static bool tmpl_apply_arg(tmpl_run *r, bool test, const tmpl_args *c, int from, tval v, tval *out) {
    tmpl_args rest = *c;
    tval name = c->pos[from];
    if (name.type != TV_STR) return tmpl_bad_type(r, test ? "test" : "filter", name);
    rest.self = v;
    rest.pos += from + 1, rest.n_pos -= from + 1;
    return test ? tmpl_apply_test(r, tv_text(name), &rest, out) : tmpl_apply_filter(r, tv_text(name), &rest, out);
}

static bool tmpl_f_map(tmpl_run *r, tmpl_args *c, tval *out) { /* attribute= [default=], or a filter's name and arguments */
    tmpl_items *l, *made;
    tval path = tmpl_named_arg(c, STR("attribute")), otherwise = tmpl_named_arg(c, STR("default"));
    if (!c->n_pos && !path.type) return tmpl_fail(r, "map needs a filter or attribute=");
    if (!tmpl_walk_any(r, c->self, &l) || !(made = tmpl_new_items(r, l->n))) return false;
    for (size_t i = 0; i < l->n; i++)
        if (c->n_pos ? !tmpl_apply_arg(r, false, c, 0, l->v[i], &made->v[i])
                     : !tmpl_attr_path(r, l->v[i], path, otherwise, &made->v[i]))
            return false;
    return *out = tv_list(TV_GENERATOR, made), true;
}

enum { CHOOSE_ATTR = 1, CHOOSE_NOT = 2 };

/* select, reject, selectattr, rejectattr: what passes a test, without one what is true; of it or of its attribute. */
static bool tmpl_f_choose(tmpl_run *r, tmpl_args *c, tval *out) {
    tmpl_items *l, *kept;
    int attr = c->op & CHOOSE_ATTR;
    if (attr && !c->n_pos) return tmpl_fail(r, "an attribute name is missing");
    if (!tmpl_walk_any(r, c->self, &l) || !(kept = tmpl_new_items(r, l->n))) return false;
    kept->n = 0;
    for (size_t i = 0; i < l->n; i++) {
        tval v = l->v[i];
        if (attr && !tmpl_attr_path(r, v, c->pos[0], (tval){0}, &v)) return false;
        if (c->n_pos > attr && !tmpl_apply_arg(r, true, c, attr, v, &v)) return false;
        if (tv_true(v) == !(c->op & CHOOSE_NOT)) kept->v[kept->n++] = l->v[i];
    }
    return *out = tv_list(TV_GENERATOR, kept), true;
}

/* ---- Dicts ---- */

static bool tmpl_f_get(tmpl_run *r, tmpl_args *c, tval *out) { /* key default */
    if (!tmpl_dict_find(r, c->self.dict, c->a[0], out)) return false;
    if (!out->type) *out = c->a[1].type ? c->a[1] : tv_none();
    return true;
}
static bool tmpl_f_parts(tmpl_run *r, tmpl_args *c, tval *out) { /* keys, values, items */
    tmpl_items *l = tmpl_dict_list(r, c->self.dict, (tmpl_part)c->op);
    return *out = tv_list(TV_LIST, l), l != NULL;
}

/* ---- Tests ---- */

static bool tmpl_is(tval v, int test) { /* a number of the word list below */
    switch (test) {
    case 0: return v.type != TV_UNDEFINED;
    case 1: return v.type == TV_UNDEFINED;
    case 2: return v.type == TV_NONE;
    case 3: return v.type == TV_BOOL;
    case 4: return v.type == TV_BOOL && v.i;
    case 5: return v.type == TV_BOOL && !v.i;
    case 6: return v.type == TV_INT;
    case 7: return v.type == TV_FLOAT;
    case 8: return tv_is_number(v);
    case 9: return v.type == TV_STR;
    case 10: return v.type == TV_DICT;
    case 11: return v.type == TV_UNDEFINED || (v.type >= TV_STR && v.type <= TV_GENERATOR);
    case 12: return v.type == TV_UNDEFINED || (v.type >= TV_STR && v.type <= TV_DICT);
    default: return v.type >= TV_MACRO;
    }
}

/* self is name(pos): a question about the type, a comparison, or whether a number divides another. */
static bool tmpl_apply_test(tmpl_run *r, str name, const tmpl_args *c, tval *out) {
    static const char types[] = "defined undefined none boolean true false integer float number string mapping iterable "
                                "sequence callable";
    static const char comparisons[] = "== eq equalto sameas != ne < lt <= le > gt >= ge in";
    static const uint16_t ops[] = {OP_EQ, OP_EQ, OP_EQ, OP_EQ, OP_NE, OP_NE, '<', '<', OP_LE, OP_LE, '>', '>', OP_GE, OP_GE,
        OP_IN};
    int type = tmpl_word_index(types, name), comparison = tmpl_word_index(comparisons, name);
    int division = tmpl_word_index("even odd divisibleby", name);
    tval self = c->self, rest;
    if (type < 0 && comparison < 0 && division < 0) return tmpl_fail(r, "test '%.*s' is not supported", STRF(name));
    if (c->n_named || c->n_pos != (comparison >= 0 || division == 2))
        return tmpl_fail(r, "test '%.*s': wrong number of arguments", STRF(name));
    if (type >= 0) return *out = tv_bool(tmpl_is(self, type)), true;
    if (str_is(name, "sameas") && self.type != c->pos[0].type) return *out = tv_bool(false), true;
    if (comparison >= 0) return tmpl_binary(r, ops[comparison], self, c->pos[0], out);
    if (!tmpl_binary(r, '%', self, division == 2 ? c->pos[0] : tv_int(2), &rest)) return false;
    return *out = tv_bool(tv_true(rest) == (division == 1)), true;
}

/* ---- Global functions ---- */

/* range([start,] stop[, step]); at most 100,000 numbers, as in the sandbox. */
static bool tmpl_g_range(tmpl_run *r, tmpl_args *c, tval *out) {
    for (int i = 0; i < 3; i++)
        if (c->a[i].type && !tv_is_integer(c->a[i])) return tmpl_bad_type(r, "range", c->a[i]);
    bool one = !c->a[1].type;
    int64_t from = one ? 0 : c->a[0].i, to = c->a[one ? 0 : 1].i, step = c->a[2].type ? c->a[2].i : 1;
    if (!step) return tmpl_fail(r, "range: step 0");
    uint64_t span = step > 0 ? (uint64_t)to - (uint64_t)from : (uint64_t)from - (uint64_t)to;
    uint64_t by = step > 0 ? (uint64_t)step : 0 - (uint64_t)step;
    uint64_t n = (step > 0 ? from < to : from > to) ? (span - 1) / by + 1 : 0;
    if (n > 100000) return tmpl_fail(r, "range: more than 100000 numbers");
    tmpl_items *l = tmpl_new_items(r, n);
    for (uint64_t i = 0; l && i < n; i++) l->v[i] = tv_int((int64_t)((uint64_t)from + i * (uint64_t)step));
    return *out = tv_list(TV_LIST, l), l != NULL;
}

/* dict(...) and namespace(...), which op says: a dict to start from, then name=value. */
static bool tmpl_g_dict(tmpl_run *r, tmpl_args *c, tval *out) {
    tmpl_dict *d = tmpl_new_dict(r), *from = c->n_pos && c->pos[0].type == TV_DICT ? c->pos[0].dict : NULL;
    bool ok = d && (c->n_pos == (from != NULL) || tmpl_fail(r, "a dict and name=value expected"));
    for (size_t i = 0; ok && from && i < from->n; i++) ok = tmpl_dict_set(r, d, from->at[i].key, from->at[i].v);
    for (int i = 0; ok && i < c->n_named; i++) ok = tmpl_dict_set(r, d, tv_str(c->names[i]), c->named[i]);
    *out = (tval){.type = (uint8_t)c->op, .dict = d};
    return ok;
}

static bool tmpl_g_raise(tmpl_run *r, tmpl_args *c, tval *out) { /* message */
    return tmpl_to_text(r, c->a[0], out) && tmpl_fail(r, "%.*s", STRF(tv_text(*out)));
}

/* One conversion of strftime in the C locale; false if it is not known. `pad` false: no leading zero ("%-d"). */
static bool tmpl_time_part(buf *b, const tmpl_time *t, char c, bool pad) {
    static const char *const days[] = {"Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"};
    static const char *const months[] = {"January", "February", "March", "April", "May", "June", "July", "August",
        "September", "October", "November", "December"};
    const char *day = days[((t->weekday % 7) + 7) % 7], *month = months[((t->month % 12) + 12) % 12];
    const char *two = pad ? "%02d" : "%d";
    switch (c) {
    case 'a': buf_put(b, day, 3); break;
    case 'A': buf_c(b, day); break;
    case 'b': buf_put(b, month, 3); break;
    case 'B': buf_c(b, month); break;
    case 'p': buf_c(b, t->hour < 12 ? "AM" : "PM"); break;
    case '%': buf_char(b, '%'); break;
    case 'Y': buf_printf(b, "%d", t->year + 1900); break;
    case 'y': buf_printf(b, two, ((t->year % 100) + 100) % 100); break;
    case 'm': buf_printf(b, two, t->month + 1); break;
    case 'd': buf_printf(b, two, t->day); break;
    case 'H': buf_printf(b, two, t->hour); break;
    case 'I': buf_printf(b, two, t->hour % 12 ? t->hour % 12 : 12); break;
    case 'M': buf_printf(b, two, t->minute); break;
    case 'S': buf_printf(b, two, t->second); break;
    case 'j': buf_printf(b, pad ? "%03d" : "%d", t->yearday + 1); break;
    case 'z': case 'Z': break; /* no time zone is known: empty, as for Python's naive times */
    default: return false;
    }
    return true;
}

static bool tmpl_g_strftime(tmpl_run *r, tmpl_args *c, tval *out) { /* format */
    if (c->a[0].type != TV_STR) return tmpl_bad_type(r, "strftime_now", c->a[0]);
    str s = tv_text(c->a[0]);
    buf b = {0};
    bool ok = tmpl_fits(r, 10 * s.n, &b);
    for (size_t i = 0; ok && i < s.n; i++) {
        bool pad = !(i + 1 < s.n && s.p[i] == '%' && s.p[i + 1] == '-');
        if (s.p[i] != '%') buf_char(&b, s.p[i]);
        else if ((i += pad ? 1 : 2) >= s.n || !tmpl_time_part(&b, &r->now, s.p[i], pad))
            ok = tmpl_fail(r, "strftime_now: format '%.*s' is not supported", STRF(s));
    }
    return tmpl_finish(r, &b, ok, out);
}

/* ---- All of them ---- */

static const tmpl_fn tmpl_fns[] = {
    {OF_FILTER, "capitalize", "", 0, tmpl_f_case, CASE_CAPITAL},
    {OF_FILTER, "count", "", 0, tmpl_f_length, 0},
    {OF_FILTER, "d", "default_value boolean", 0, tmpl_f_default, 0},
    {OF_FILTER, "default", "default_value boolean", 0, tmpl_f_default, 0},
    {OF_FILTER, "dictsort", "case_sensitive by reverse", 0, tmpl_f_dictsort, 0},
    {OF_FILTER, "e", "", 0, tmpl_f_escape, 0},
    {OF_FILTER, "escape", "", 0, tmpl_f_escape, 0},
    {OF_FILTER, "first", "", 0, tmpl_f_list, LIST_FIRST},
    {OF_FILTER, "float", "default", 0, tmpl_f_number, TV_FLOAT},
    {OF_FILTER, "indent", "width first blank", 0, tmpl_f_indent, 0},
    {OF_FILTER, "int", "default", 0, tmpl_f_number, TV_INT},
    {OF_FILTER, "items", "", 0, tmpl_f_list, LIST_ITEMS},
    {OF_FILTER, "join", "d attribute", 0, tmpl_f_join, 0},
    {OF_FILTER, "last", "", 0, tmpl_f_list, LIST_LAST},
    {OF_FILTER, "length", "", 0, tmpl_f_length, 0},
    {OF_FILTER, "list", "", 0, tmpl_f_list, LIST_ALL},
    {OF_FILTER, "lower", "", 0, tmpl_f_case, CASE_LOWER},
    {OF_FILTER, "map", "*", 0, tmpl_f_map, 0},
    {OF_FILTER, "reject", "*", 0, tmpl_f_choose, CHOOSE_NOT},
    {OF_FILTER, "rejectattr", "*", 0, tmpl_f_choose, CHOOSE_ATTR | CHOOSE_NOT},
    {OF_FILTER, "replace", "old new count", 2, tmpl_f_replace, 0},
    {OF_FILTER, "reverse", "", 0, tmpl_f_list, LIST_REVERSED},
    {OF_FILTER, "safe", "", 0, tmpl_f_safe, 0},
    {OF_FILTER, "select", "*", 0, tmpl_f_choose, 0},
    {OF_FILTER, "selectattr", "*", 0, tmpl_f_choose, CHOOSE_ATTR},
    {OF_FILTER, "sort", "reverse case_sensitive attribute", 0, tmpl_f_sort, 0},
    {OF_FILTER, "string", "", 0, tmpl_f_string, 0},
    {OF_FILTER, "title", "", 0, tmpl_f_case, CASE_TITLE},
    {OF_FILTER, "tojson", "ensure_ascii indent separators sort_keys", 0, tmpl_f_tojson, 0},
    {OF_FILTER, "trim", "chars", 0, tmpl_f_strip, STRIP_LEFT | STRIP_RIGHT},
    {OF_FILTER, "unique", "case_sensitive attribute", 0, tmpl_f_unique, 0},
    {OF_FILTER, "upper", "", 0, tmpl_f_case, CASE_UPPER},
    {OF_TEXT, "capitalize", "", 0, tmpl_f_case, CASE_CAPITAL},
    {OF_TEXT, "endswith", "suffix", 1, tmpl_f_affix, AFFIX_ENDS},
    {OF_TEXT, "find", "sub", 1, tmpl_f_find, 0},
    {OF_TEXT, "join", "iterable", 1, tmpl_f_join, 1},
    {OF_TEXT, "lower", "", 0, tmpl_f_case, CASE_LOWER},
    {OF_TEXT, "lstrip", "chars", 0, tmpl_f_strip, STRIP_LEFT},
    {OF_TEXT, "removeprefix", "prefix", 1, tmpl_f_affix, AFFIX_CUT_START},
    {OF_TEXT, "removesuffix", "suffix", 1, tmpl_f_affix, AFFIX_CUT_END},
    {OF_TEXT, "replace", "old new count", 2, tmpl_f_replace, 0},
    {OF_TEXT, "rsplit", "sep maxsplit", 0, tmpl_f_split, 1},
    {OF_TEXT, "rstrip", "chars", 0, tmpl_f_strip, STRIP_RIGHT},
    {OF_TEXT, "split", "sep maxsplit", 0, tmpl_f_split, 0},
    {OF_TEXT, "startswith", "prefix", 1, tmpl_f_affix, AFFIX_STARTS},
    {OF_TEXT, "strip", "chars", 0, tmpl_f_strip, STRIP_LEFT | STRIP_RIGHT},
    {OF_TEXT, "title", "", 0, tmpl_f_case, CASE_TITLE_METHOD},
    {OF_TEXT, "upper", "", 0, tmpl_f_case, CASE_UPPER},
    {OF_DICT, "get", "key default", 1, tmpl_f_get, 0},
    {OF_DICT, "items", "", 0, tmpl_f_parts, PART_ITEMS},
    {OF_DICT, "keys", "", 0, tmpl_f_parts, PART_KEYS},
    {OF_DICT, "values", "", 0, tmpl_f_parts, PART_VALUES},
    {OF_ALL, "dict", "*", 0, tmpl_g_dict, TV_DICT},
    {OF_ALL, "namespace", "*", 0, tmpl_g_dict, TV_NAMESPACE},
    {OF_ALL, "raise_exception", "message", 1, tmpl_g_raise, 0},
    {OF_ALL, "range", "start stop step", 1, tmpl_g_range, 0},
    {OF_ALL, "strftime_now", "format", 1, tmpl_g_strftime, 0}};

static const tmpl_fn *tmpl_find_fn(tmpl_owner of, str name) {
    for (int i = 0; i < COUNT(tmpl_fns); i++)
        if (tmpl_fns[i].of == of && str_is(name, tmpl_fns[i].name)) return &tmpl_fns[i];
    return NULL;
}

/* Binds the arguments to the parameters of fn and runs it on c->self. */
static bool tmpl_apply(tmpl_run *r, const tmpl_fn *fn, tmpl_args *c, tval *out) {
    bool raw = *fn->params == '*';
    memset(c->a, 0, sizeof c->a);
    for (int i = 0; !raw && i < c->n_pos + c->n_named; i++) {
        bool named = i >= c->n_pos;
        int k = named ? tmpl_word_index(fn->params, c->names[i - c->n_pos]) : i;
        int n = *fn->params ? 1 : 0;
        for (const char *p = fn->params; *p; p++) n += *p == ' ';
        if (k >= n) return tmpl_fail(r, "%s: %d arguments, at most %d", fn->name, c->n_pos, n);
        if (k < 0) return tmpl_fail(r, "%s: an argument name is not known", fn->name);
        if (c->a[k].type) return tmpl_fail(r, "%s: argument %d is given twice", fn->name, k + 1);
        c->a[k] = named ? c->named[i - c->n_pos] : c->pos[i];
    }
    for (int i = 0; i < fn->need; i++)
        if (!c->a[i].type) return tmpl_fail(r, "%s: argument %d is missing", fn->name, i + 1);
    c->op = fn->op;
    return tmpl_enter(r) && tmpl_leave(r, fn->run(r, c, out));
}

static bool tmpl_apply_filter(tmpl_run *r, str name, tmpl_args *c, tval *out) {
    const tmpl_fn *fn = tmpl_find_fn(OF_FILTER, name);
    return fn ? tmpl_apply(r, fn, c, out) : tmpl_fail(r, "filter '%.*s' is not supported", STRF(name));
}

/* ---- Attributes ---- */

static bool tmpl_loop_attr(tmpl_run *r, tmpl_loop *l, str name, tval *out);

/* The attribute itself, dict members apart: a method, an attribute of a loop or namespace. *out TV_ABSENT: none. */
static bool tmpl_own_attr(tmpl_run *r, tval v, str name, tval *out) {
    *out = (tval){0};
    if (v.type == TV_LOOP) return tmpl_loop_attr(r, v.loop, name, out);
    if (v.type == TV_NAMESPACE) return tmpl_dict_find(r, v.dict, tv_str(name), out);
    if (v.type != TV_STR && v.type != TV_DICT) return true;
    const tmpl_fn *fn = tmpl_find_fn(v.type == TV_STR ? OF_TEXT : OF_DICT, name);
    if (!fn) return true;
    tmpl_method *m = tmpl_alloc(r, 1, sizeof *m);
    if (!m) return false;
    *m = (tmpl_method){.self = v, .fn = fn};
    *out = (tval){.type = TV_METHOD, .method = m};
    return true;
}

/* v.name: the attribute, else the element, else undefined. */
static bool tmpl_attr(tmpl_run *r, tval v, str name, tval *out) {
    if (v.type == TV_UNDEFINED) return tmpl_bad_type(r, "attribute", v);
    if (!tmpl_own_attr(r, v, name, out)) return false;
    if (!out->type && !tmpl_element(r, v, tv_str(name), out)) return false;
    if (!out->type) *out = tv_undefined(name, v.type);
    return true;
}

/* v[key]: the element, else for a name the attribute, else undefined. */
static bool tmpl_item(tmpl_run *r, tval v, tval key, tval *out) {
    tval name = tv_str(STR("?"));
    if (v.type == TV_UNDEFINED) return tmpl_bad_type(r, "[]", v);
    if (!tmpl_element(r, v, key, out)) return false;
    if (!out->type && key.type == TV_STR && !tmpl_own_attr(r, v, tv_text(key), out)) return false;
    if (out->type) return true;
    if (key.type <= TV_STR && !tmpl_to_text(r, key, &name)) return false;
    return *out = tv_undefined(tv_text(name), v.type), true;
}

/* "a.b.0" of v, as attribute= of map, sort and others names it; v itself if the path is absent. A part that is missing
 * becomes `otherwise`, if there is one. */
static bool tmpl_attr_path(tmpl_run *r, tval v, tval path, tval otherwise, tval *out) {
    str dot = STR("."), part;
    *out = v;
    if (path.type == TV_INT) return tmpl_item(r, v, path, out);
    if (path.type != TV_STR) return path.type <= TV_NONE || tmpl_bad_type(r, "attribute=", path);
    for (size_t at = 0; tmpl_next_part(tv_text(path), &dot, &at, &part);) {
        tval key = tv_str(part);
        if (part.n && isdigit((unsigned char)part.p[0]) && !tmpl_parse_number(r, part, &key)) return false;
        if (!tmpl_item(r, *out, key, out)) return false;
        if (out->type == TV_UNDEFINED && otherwise.type > TV_NONE) *out = otherwise;
    }
    return true;
}

/* ---- Scopes ---- */

static bool tmpl_get_var(tmpl_run *r, int id, tval *out) { /* *out TV_ABSENT: no such variable */
    for (const tmpl_scope *s = r->scope; s; s = s->outer) {
        for (int i = 0; i < s->n; i++)
            if (s->vars[i].id == id) return *out = s->vars[i].v, true;
        if (!tmpl_work(r, (size_t)s->n)) return false;
    }
    return *out = r->globals[id], true;
}

static bool tmpl_set_var(tmpl_run *r, int id, tval v) {
    tmpl_scope *s = r->scope;
    if (!s) return r->globals[id] = v, true;
    for (int i = 0; i < s->n; i++)
        if (s->vars[i].id == id) return s->vars[i].v = v, tmpl_work(r, (size_t)i);
    if (s->n == s->cap) {
        int cap = MAX(s->cap * 2, 4);
        tmpl_var *vars = tmpl_alloc(r, (size_t)cap, sizeof *vars);
        if (!vars) return false;
        if (s->n) memcpy(vars, s->vars, (size_t)s->n * sizeof *vars);
        s->vars = vars, s->cap = cap;
    }
    s->vars[s->n++] = (tmpl_var){id, v};
    return true;
}

static bool tmpl_push_scope(tmpl_run *r, tmpl_scope *outer) {
    tmpl_scope *s = tmpl_alloc(r, 1, sizeof *s);
    if (s) *s = (tmpl_scope){.outer = outer}, r->scope = s;
    return s != NULL;
}

/* ---- Calls ---- */

static bool tmpl_eval(tmpl_run *r, const tmpl_node *n, tval *out);
static bool tmpl_capture(tmpl_run *r, const tmpl_node *body, tval *out);

static int tmpl_chain_len(const tmpl_node *chain) {
    int n = 0;
    for (; chain; chain = chain->next) n++;
    return n;
}

static bool tmpl_eval_args(tmpl_run *r, const tmpl_node *chain, tmpl_args *c) {
    size_t n = (size_t)tmpl_chain_len(chain);
    *c = (tmpl_args){0};
    if (!n) return true;
    if (!(c->pos = tmpl_alloc(r, n, sizeof *c->pos)) || !(c->named = tmpl_alloc(r, n, sizeof *c->named)) ||
        !(c->names = tmpl_alloc(r, n, sizeof *c->names)))
        return false;
    for (const tmpl_node *it = chain; it; it = it->next) {
        bool named = it->kind == TN_KEYWORD;
        if (named) c->names[c->n_named] = it->s;
        if (!tmpl_eval(r, named ? it->a : it, named ? &c->named[c->n_named++] : &c->pos[c->n_pos++])) return false;
    }
    return true;
}

/* Sets the parameters of a macro or call block in the scope just made for it. */
static bool tmpl_bind_params(tmpl_run *r, const tmpl_args *c, const tmpl_node *macro) {
    int n = 0, used_named = 0;
    for (const tmpl_node *p = macro->b; p; p = p->next, n++) {
        tval v = tmpl_named_arg(c, p->s);
        if (v.type) used_named++;
        if (v.type && n < c->n_pos)
            return tmpl_fail(r, "%.*s: argument '%.*s' is given twice", STRF(macro->s), STRF(p->s));
        if (!tmpl_set_var(r, p->id, n < c->n_pos ? c->pos[n] : v)) return false;
    }
    if (c->n_pos > n) return tmpl_fail(r, "%.*s: %d arguments, at most %d", STRF(macro->s), c->n_pos, n);
    if (used_named < c->n_named) return tmpl_fail(r, "%.*s: an argument name is not known", STRF(macro->s));
    for (const tmpl_node *p = macro->b; p; p = p->next) { /* defaults see all parameters, and only those around the macro */
        tval v;
        if (!tmpl_get_var(r, p->id, &v)) return false;
        if (!v.type && p->a && (!tmpl_eval(r, p->a, &v) || !tmpl_set_var(r, p->id, v))) return false;
    }
    return true;
}

static bool tmpl_call_macro(tmpl_run *r, const tmpl_macro *m, const tmpl_args *c, tval *out) {
    tmpl_scope *back = r->scope;
    bool ok = tmpl_enter(r) && tmpl_push_scope(r, m->scope) && tmpl_bind_params(r, c, m->node);
    ok = ok && tmpl_capture(r, m->node->c, out);
    r->scope = back;
    return tmpl_leave(r, ok);
}

static bool tmpl_call(tmpl_run *r, const tmpl_node *n, tval *out) {
    tmpl_args c;
    tval callee;
    if (!tmpl_eval(r, n->a, &callee) || !tmpl_eval_args(r, n->b, &c)) return false;
    switch (callee.type) {
    case TV_MACRO: return tmpl_call_macro(r, callee.macro, &c, out);
    case TV_METHOD: c.self = callee.method->self; return tmpl_apply(r, callee.method->fn, &c, out);
    case TV_FUNCTION: return tmpl_apply(r, callee.fn, &c, out);
    case TV_UNDEFINED: return tmpl_bad_type(r, "a call", callee);
    default: return tmpl_fail(r, "'%s' object is not callable", tmpl_type_name(callee.type));
    }
}

/* ---- Expressions ---- */

static bool tmpl_eval_list(tmpl_run *r, const tmpl_node *n, tval *out) {
    tmpl_items *l = tmpl_new_items(r, (size_t)tmpl_chain_len(n->b));
    if (!l) return false;
    size_t i = 0;
    for (const tmpl_node *it = n->b; it; it = it->next)
        if (!tmpl_eval(r, it, &l->v[i++])) return false;
    return *out = tv_list(n->kind == TN_LIST ? TV_LIST : TV_TUPLE, l), true;
}

static bool tmpl_eval_dict(tmpl_run *r, const tmpl_node *n, tval *out) {
    tmpl_dict *d = tmpl_new_dict(r);
    if (!d) return false;
    for (const tmpl_node *key = n->b; key; key = key->next->next) {
        tval k, v;
        if (!tmpl_eval(r, key, &k) || !tmpl_eval(r, key->next, &v) || !tmpl_dict_set(r, d, k, v)) return false;
    }
    return *out = (tval){.type = TV_DICT, .dict = d}, true;
}

/* A slice's bound as an index into 0..n (-1..n-1 for a negative step), as Python's slice.indices. */
static bool tmpl_bound(tmpl_run *r, const tmpl_node *e, int64_t n, bool down, int64_t otherwise, int64_t *out) {
    tval v = tv_none();
    if (e && !tmpl_eval(r, e, &v)) return false;
    *out = otherwise;
    if (v.type == TV_NONE) return true;
    if (!tv_is_integer(v)) return tmpl_bad_type(r, "a slice", v);
    int64_t low = down ? -1 : 0, high = down ? n - 1 : n;
    *out = MIN(MAX(v.i >= 0 ? v.i : v.i < -n ? low : v.i + n, low), high);
    return true;
}

static bool tmpl_eval_slice(tmpl_run *r, const tmpl_node *n, tval *out) {
    tval v, step_v = tv_int(1);
    int64_t from, to;
    tmpl_items *all, *l;
    if (!tmpl_eval(r, n->a, &v) || (n->d && !tmpl_eval(r, n->d, &step_v))) return false;
    if (v.type != TV_STR && !tv_is_list(v)) return tmpl_bad_type(r, "a slice", v);
    if (!tv_is_integer(step_v) || !step_v.i) return tmpl_fail(r, "slice: wrong step");
    int64_t len = tmpl_length(v), step = MAX(MIN(step_v.i, (int64_t)1 << 40), -((int64_t)1 << 40));
    bool down = step < 0;
    if (!tmpl_bound(r, n->b, len, down, down ? len - 1 : 0, &from) || !tmpl_bound(r, n->c, len, down, down ? -1 : len, &to))
        return false;
    if (v.type == TV_STR && step == 1) return *out = tmpl_substring(v, from, MAX(from, to)), tmpl_work(r, v.n);
    int64_t count = down ? (from > to ? (from - to - 1) / -step + 1 : 0) : to > from ? (to - from - 1) / step + 1 : 0;
    if (!tmpl_walk(r, v, &all) || !(l = tmpl_new_items(r, (size_t)count))) return false;
    for (int64_t i = 0; i < count; i++) l->v[i] = all->v[from + i * step];
    if (v.type == TV_STR) return tmpl_join(r, l, STR(""), (tval){0}, out);
    return *out = tv_list(v.type, l), true;
}

static bool tmpl_eval_sign(tmpl_run *r, const tmpl_node *n, tval *out) {
    tval v;
    if (!tmpl_eval(r, n->a, &v)) return false;
    if (!tv_is_number(v)) return tmpl_bad_type(r, "a sign", v);
    if (v.type == TV_FLOAT) return *out = tv_float(n->op == '-' ? -v.f : v.f), true;
    return tmpl_int_op(r, n->op, 0, v.i, out);
}

static bool tmpl_eval_applied(tmpl_run *r, const tmpl_node *n, tval *out) { /* filter or test */
    tmpl_args c;
    tval self;
    if (!tmpl_eval(r, n->a, &self) || !tmpl_eval_args(r, n->b, &c)) return false;
    c.self = self;
    if (n->kind == TN_FILTER) return tmpl_apply_filter(r, n->s, &c, out);
    return tmpl_apply_test(r, n->s, &c, out) && (*out = tv_bool(tv_true(*out) != n->op), true);
}

static bool tmpl_eval_binary(tmpl_run *r, const tmpl_node *n, tval *out) {
    tval a, b;
    if (!tmpl_eval(r, n->a, &a)) return false;
    if (n->op == OP_AND || n->op == OP_OR)
        return tv_true(a) == (n->op == OP_OR) ? (*out = a, true) : tmpl_eval(r, n->b, out);
    return tmpl_eval(r, n->b, &b) && tmpl_binary(r, n->op, a, b, out);
}

static bool tmpl_eval_any(tmpl_run *r, const tmpl_node *n, tval *out) {
    tval a, b;
    switch (n->kind) {
    case TN_NONE: return *out = tv_none(), true;
    case TN_BOOL: return *out = tv_bool(n->i), true;
    case TN_INT: return *out = tv_int(n->i), true;
    case TN_FLOAT: return *out = tv_float(n->f), true;
    case TN_STRING: return *out = tv_str(n->s), true;
    case TN_NAME:
        if (!tmpl_get_var(r, n->id, out)) return false;
        return out->type || (*out = tv_undefined(n->s, 0), true);
    case TN_LIST: case TN_TUPLE: return tmpl_eval_list(r, n, out);
    case TN_DICT: return tmpl_eval_dict(r, n, out);
    case TN_ATTR: return tmpl_eval(r, n->a, &a) && tmpl_attr(r, a, n->s, out);
    case TN_ITEM: return tmpl_eval(r, n->a, &a) && tmpl_eval(r, n->b, &b) && tmpl_item(r, a, b, out);
    case TN_SLICE: return tmpl_eval_slice(r, n, out);
    case TN_CALL: return tmpl_call(r, n, out);
    case TN_FILTER: case TN_TEST: return tmpl_eval_applied(r, n, out);
    case TN_NOT: return tmpl_eval(r, n->a, &a) && (*out = tv_bool(!tv_true(a)), true);
    case TN_SIGN: return tmpl_eval_sign(r, n, out);
    case TN_BINARY: return tmpl_eval_binary(r, n, out);
    case TN_COND:
        if (!tmpl_eval(r, n->a, &a)) return false;
        if (tv_true(a)) return tmpl_eval(r, n->b, out);
        return n->c ? tmpl_eval(r, n->c, out) : (*out = tv_undefined(STR("if without else"), 0), true);
    case TN_CAPTURED: return *out = r->captured, true;
    default: return tmpl_fail(r, "not an expression");
    }
}

static bool tmpl_eval(tmpl_run *r, const tmpl_node *n, tval *out) {
    int line = r->line;
    r->line = n->line;
    if (!tmpl_work(r, 0) || !tmpl_enter(r) || !tmpl_eval_any(r, n, out)) return false;
    r->line = line; /* an error keeps the line of where it happened */
    return tmpl_leave(r, true);
}

/* ---- Statements ---- */

typedef enum tmpl_flow { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE, FLOW_FAIL } tmpl_flow;
static tmpl_flow tmpl_exec(tmpl_run *r, const tmpl_node *chain);

static bool tmpl_assign(tmpl_run *r, const tmpl_node *target, tval v) {
    tmpl_items *l;
    tval ns;
    switch (target->kind) {
    case TN_NAME: return tmpl_set_var(r, target->id, v);
    case TN_NSREF:
        if (!tmpl_get_var(r, target->id, &ns)) return false;
        if (ns.type == TV_NAMESPACE) return tmpl_dict_set(r, ns.dict, tv_str(target->s), v);
        return tmpl_fail(r, "cannot assign attribute '%.*s': not a namespace", STRF(target->s));
    default: break;
    }
    size_t n = (size_t)tmpl_chain_len(target->b);
    if (!tmpl_walk(r, v, &l)) return false;
    if (n != l->n) return tmpl_fail(r, "%zu values to unpack into %zu names", l->n, n);
    n = 0;
    for (const tmpl_node *it = target->b; it; it = it->next)
        if (!tmpl_assign(r, it, l->v[n++])) return false;
    return true;
}

/* Runs a body and gives what it writes as a value. */
static bool tmpl_capture(tmpl_run *r, const tmpl_node *body, tval *out) {
    buf b = {0}, *outside = r->out;
    r->out = &b;
    bool ok = tmpl_exec(r, body) == FLOW_ON;
    r->out = outside;
    return tmpl_finish(r, &b, ok, out);
}

/* A set or filter block: what the body writes in a scope of its own goes through the filters. */
static bool tmpl_filtered(tmpl_run *r, const tmpl_node *n, tval *out) {
    tval outer = r->captured, text;
    tmpl_scope *back = r->scope;
    if (!tmpl_push_scope(r, back) || !tmpl_capture(r, n->c, &text)) return false;
    r->scope = back;
    r->captured = text;
    bool ok = tmpl_eval(r, n->b, out);
    r->captured = outer;
    return ok;
}

static bool tmpl_new_macro(tmpl_run *r, const tmpl_node *n, tval *out) {
    tmpl_macro *m = tmpl_alloc(r, 1, sizeof *m);
    if (!m) return false;
    *m = (tmpl_macro){.node = n, .scope = r->scope};
    return *out = (tval){.type = TV_MACRO, .macro = m}, true;
}

static tmpl_flow tmpl_exec_if(tmpl_run *r, const tmpl_node *n) {
    for (; n; n = n->c) {
        tval v = tv_bool(true);
        if (n->a && !tmpl_eval(r, n->a, &v)) return FLOW_FAIL;
        if (tv_true(v)) return tmpl_exec(r, n->b);
    }
    return FLOW_ON;
}

static tmpl_flow tmpl_exec_scope(tmpl_run *r, tmpl_scope *outer, const tmpl_node *body) {
    tmpl_scope *back = r->scope;
    tmpl_flow flow = tmpl_push_scope(r, outer) ? tmpl_exec(r, body) : FLOW_FAIL;
    r->scope = back;
    return flow;
}

/* ---- Loops ---- */

/* The next element that passes the loop's condition. *v TV_ABSENT: there is none. The condition sees only the target. */
static bool tmpl_loop_step(tmpl_run *r, tmpl_loop *l, tval *v) {
    tmpl_scope *back = r->scope;
    for (*v = (tval){0}; !v->type && l->at < l->items->n;) {
        tval candidate = l->items->v[l->at++], passed = tv_bool(true);
        if (!tmpl_work(r, 0)) return false;
        if (l->node->d && !l->settled) {
            bool ok = tmpl_push_scope(r, l->scope) && tmpl_assign(r, l->node->a, candidate) &&
                      tmpl_eval(r, l->node->d, &passed);
            r->scope = back;
            if (!ok) return false;
        }
        if (tv_true(passed)) *v = candidate;
    }
    return true;
}

/* Applies the condition to all that is left, for the attributes that look ahead. */
static bool tmpl_loop_settle(tmpl_run *r, tmpl_loop *l) {
    if (!l->node->d || l->settled) return true;
    tmpl_items *left = tmpl_new_items(r, l->items->n - l->at);
    if (!left) return false;
    for (left->n = 0;; left->n++) {
        tval v;
        if (!tmpl_loop_step(r, l, &v)) return false;
        if (!v.type) break;
        left->v[left->n] = v;
    }
    l->items = left, l->at = 0, l->settled = true;
    return true;
}

static bool tmpl_loop_attr(tmpl_run *r, tmpl_loop *l, str name, tval *out) {
    int which = tmpl_word_index("index index0 first previtem last nextitem length revindex revindex0", name);
    if (which > 3 && !tmpl_loop_settle(r, l)) return false;
    int64_t left = (int64_t)(l->items->n - l->at);
    switch (which) {
    case 0: *out = tv_int(l->index0 + 1); break;
    case 1: *out = tv_int(l->index0); break;
    case 2: *out = tv_bool(l->index0 == 0); break;
    case 3: *out = l->index0 ? l->before : tv_undefined(name, TV_LOOP); break;
    case 4: *out = tv_bool(!left); break;
    case 5: *out = left ? l->items->v[l->at] : tv_undefined(name, TV_LOOP); break;
    case 6: *out = tv_int(l->index0 + 1 + left); break;
    case 7: *out = tv_int(left + 1); break;
    case 8: *out = tv_int(left); break;
    default: break;
    }
    return true;
}

/* The body once for each element, every time with only the target and `loop` in its scope. As in Jinja it is one scope, so
 * that a macro defined in it sees the latest element; and the else body runs when no iteration came to the end of its body,
 * also after a break in the first one. */
static tmpl_flow tmpl_loop_bodies(tmpl_run *r, tmpl_loop *l, bool *ended) {
    const tmpl_node *n = l->node;
    tmpl_scope *outside = r->scope, *body;
    if (!tmpl_push_scope(r, outside)) return FLOW_FAIL;
    for (body = r->scope;; body->n = 0) {
        tval v;
        r->scope = outside;
        if (!tmpl_loop_step(r, l, &v)) return FLOW_FAIL;
        if (!v.type) return FLOW_ON;
        l->index0++;
        l->before = l->now;
        l->now = v;
        r->scope = body;
        if (!tmpl_assign(r, n->a, v) || !tmpl_set_var(r, TMPL_LOOP, (tval){.type = TV_LOOP, .loop = l})) return FLOW_FAIL;
        tmpl_flow flow = tmpl_exec(r, n->c);
        if (flow == FLOW_FAIL || flow == FLOW_BREAK) return flow;
        *ended |= flow == FLOW_ON;
    }
}

static tmpl_flow tmpl_exec_for(tmpl_run *r, const tmpl_node *n) {
    tval v;
    bool ended = false;
    tmpl_scope *back = r->scope;
    tmpl_loop *l = tmpl_alloc(r, 1, sizeof *l);
    if (!l || !tmpl_eval(r, n->b, &v)) return FLOW_FAIL;
    *l = (tmpl_loop){.node = n, .scope = back, .index0 = -1};
    if (!tmpl_walk(r, v, &l->items)) return FLOW_FAIL;
    tmpl_flow flow = tmpl_loop_bodies(r, l, &ended);
    r->scope = back;
    if (flow == FLOW_FAIL || ended || !n->e) return flow == FLOW_FAIL ? FLOW_FAIL : FLOW_ON;
    return tmpl_exec_scope(r, back, n->e);
}

static tmpl_flow tmpl_exec_one(tmpl_run *r, const tmpl_node *n) {
    tval v;
    bool ok = true;
    switch (n->kind) {
    case TN_TEXT: ok = tmpl_put(r, r->out, n->s); break;
    case TN_PRINT: ok = tmpl_eval(r, n->a, &v) && tmpl_put_value(r, r->out, v, false); break;
    case TN_IF: return tmpl_exec_if(r, n);
    case TN_FOR: return tmpl_exec_for(r, n);
    case TN_SET: ok = tmpl_eval(r, n->b, &v) && tmpl_assign(r, n->a, v); break;
    case TN_SETBLOCK: ok = tmpl_filtered(r, n, &v) && tmpl_assign(r, n->a, v); break;
    case TN_FILTERED: ok = tmpl_filtered(r, n, &v) && tmpl_put_value(r, r->out, v, false); break;
    case TN_MACRO: ok = tmpl_new_macro(r, n, &v) && tmpl_set_var(r, n->id, v); break;
    case TN_SCOPE: return tmpl_exec_scope(r, r->scope, n->c);
    case TN_BREAK: return FLOW_BREAK;
    case TN_CONTINUE: return FLOW_CONTINUE;
    default: ok = tmpl_fail(r, "not a statement");
    }
    return ok ? FLOW_ON : FLOW_FAIL;
}

static tmpl_flow tmpl_exec(tmpl_run *r, const tmpl_node *chain) {
    tmpl_flow flow = FLOW_ON;
    if (!tmpl_enter(r)) return FLOW_FAIL;
    for (const tmpl_node *n = chain; n && flow == FLOW_ON; n = n->next) {
        r->line = n->line;
        flow = tmpl_work(r, 0) ? tmpl_exec_one(r, n) : FLOW_FAIL;
    }
    tmpl_leave(r, true);
    return flow;
}

/* Renders t behind what `out` holds. context: a JSON object whose members are the template's variables; its text must live
 * until the call returns. Hugging Face gives every template messages, tools and documents (null if there are none),
 * add_generation_prompt and the special tokens: so should the caller. Thread: any. */
static int tmpl_render(const tmpl *t, const json *context, tmpl_time now, tmpl_limits limits, buf *out, toka_err *e) {
    if (!json_is(context, JSON_OBJECT)) return fail(e, TOKA_E_USE, "template line 1: the context is not a JSON object");
    limits.output_bytes = MIN(limits.output_bytes, (size_t)1 << 30);
    buf text = {0};
    tmpl_run r = {.now = now, .left = limits, .memory = TMPL_MEMORY(limits), .out = &text, .line = 1, .e = e};
    bool ok = true;
    r.globals = mem_zalloc((size_t)t->n_names * sizeof *r.globals);
    for (int i = 0; i < t->n_names; i++) {
        const tmpl_fn *fn = tmpl_find_fn(OF_ALL, t->names[i]);
        if (fn) r.globals[i] = (tval){.type = TV_FUNCTION, .fn = fn};
    }
    JSON_MEMBERS(key, context) {
        ok = ok && tmpl_work(&r, (size_t)t->n_names);
        for (int i = 0; ok && i < t->n_names; i++)
            if (str_eq(t->names[i], json_str(key))) ok = tmpl_from_json(&r, key + 1, &r.globals[i]);
    }
    ok = ok && tmpl_exec(&r, t->body) == FLOW_ON;
    if (ok) buf_str(out, buf_view(&text));
    buf_free(&text);
    free(r.globals);
    arena_free(&r.a);
    return ok ? 0 : e->code;
}

/* ===========================================================================
 * MARK: 10. Model files [os]
 * In: what the user calls a model (a folder in Hugging Face layout, a hub id, a name of models.txt, or nothing: the files
 * embedded in the program). Out: an mf_model, immutable from then on: the shape, the RoPE table, every weight as a pointer
 * into the mapped file, the tokenizer's files, the template's source, the end ids and the sampling defaults.
 *
 * In the order of the text:
 *   RoPE           mf_rope_table: every kind of RoPE as one table of frequencies and one factor
 *   config         mf_config_parse, mf_generation_parse, mf_tokenizer_config_parse: JSON text to structs
 *   safetensors    st_parse: a file to a list of tensors; st_index_parse: an index to a list of files; st_set: by name
 *   binding        mf_bind: names to the named fields of toka_layer, once, by two tables, every shape checked
 *   ranks          mf_stage, mf_shard: a rank's part of a model that is spread over devices, as slices of the bound weights
 *   models.txt     mf_models_parse: the table of known models
 *   finding        mf_find: folder, name, hub cache
 *   opening        mf_open, mf_close
 * All but the last two (and st_set's heap) are pure functions of their text, which is how the fuzzers drive them.
 *
 * What always holds after mf_open: every number of the shape lies within mf_dims' limits, D is even and H a multiple of K;
 * every tensor the layer loop will touch has exactly the shape that the letters say, lies inside its file and is 2-byte
 * aligned; no data page of a weight was read. A file is hostile until checked: what is wrong with it becomes one sentence.
 *
 * Where the files leave a choice it follows transformers 5: fields that are ignored there are ignored, what is defaulted
 * there is defaulted. It refuses what toka would compute differently: other architectures and RoPE kinds, quantized
 * weights, experts, biases in the MLP. It does not download, convert or write anything.
 * =========================================================================== */

typedef enum mf_rope_kind { MF_ROPE_DEFAULT, MF_ROPE_LINEAR, MF_ROPE_LLAMA3, MF_ROPE_YARN } mf_rope_kind;
static const char *const mf_rope_names[] = {"default", "linear", "llama3", "yarn"};

typedef struct mf_rope { /* the rope_parameters (or rope_scaling and rope_theta) of a config; 0: not given */
    mf_rope_kind kind;
    double theta;
    double factor;                            /* all but default */
    double original_len;                      /* llama3, yarn: original_max_position_embeddings */
    double low_freq_factor, high_freq_factor; /* llama3 */
    double attention_factor;                  /* yarn; 0: follows from factor, mscale, mscale_all_dim */
    double mscale, mscale_all_dim;            /* yarn */
    double beta_fast, beta_slow;              /* yarn: rotations over original_len where the ramp begins and ends */
    bool fractional;                          /* yarn: "truncate": false, the ramp's ends are not rounded to whole pairs */
} mf_rope;

enum { MF_QKV_BIAS = 1, MF_O_BIAS = 2, MF_QK_NORM = 4, MF_LM_HEAD = 8 }; /* MF_LM_HEAD: not tied to the embedding */

typedef struct mf_config { /* what config.json, or a line of models.txt, says */
    const struct mf_arch *arch;
    toka_shape shape;  /* B is left 0 */
    mf_rope rope;
    unsigned features; /* MF_QKV_BIAS ... */
    int *window;       /* [L] as toka_layer.window */
    int32_t bos_id;    /* -1: none */
    int32_t *eos_ids;
    int n_eos_ids;
} mf_config;

typedef struct mf_defaults { /* what generation_config.json says about sampling; what it leaves out is off: 1, 1, 0, 1, 0 */
    bool has_do_sample, has_temperature, has_top_p, has_top_k, has_min_p, has_repetition_penalty;
    bool do_sample; /* false: greedy, and the other fields are not meant to matter */
    float temperature, top_p, min_p, repetition_penalty;
    int top_k;
} mf_defaults;

static const mf_defaults mf_no_defaults = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};

/* The files of a model inside the program; the table ends with {0}. */
typedef struct mf_embedded {
    const char *name, *begin, *end;
} mf_embedded;

typedef struct mf_model { /* immutable after mf_open */
    arena a;              /* everything below that is not mapped */
    char *name;           /* the folder's last part, the hub id or the name of models.txt */
    char *folder;         /* NULL: embedded */
    char *hub_id;         /* NULL: given as a folder, or embedded */
    char architecture[64];
    mf_config config;
    toka_shape shape;     /* = config.shape */
    toka_weights weights; /* tensors point into the maps */
    int64_t n_parameters;
    size_t weight_bytes;
    str tokenizer_json, tokenizer_config; /* mapped; empty if there is no such file */
    str chat_template;    /* Jinja source; empty: none */
    str tool_template;    /* the one for chats with tools, where the model has two; empty: none */
    char *bos_token, *eos_token, *pad_token, *unk_token; /* texts for the template, NULL: none */
    int32_t bos_id;       /* -1: none */
    int32_t *eos_ids;
    int n_eos_ids;
    mf_defaults defaults;
    const mf_embedded *embedded; /* not NULL: where files come from, instead of folder */
    str *maps;            /* heap; what mf_close unmaps */
    int n_maps;
} mf_model;

/* ---- RoPE: every kind is a table of D/2 frequencies and one factor ----
 * The float32 steps and their order are those of transformers (modeling_rope_utils), where number / tensor is the tensor's
 * reciprocal times the number. So tables agree to the rounding of powf, and angles at far positions with them. */

/* llama3 (Llama 3.1 and later): waves longer than original_len / low are slowed by factor, those shorter than
 * original_len / high are kept, and between them the two are blended. */
static float mf_rope_llama3(const mf_rope *r, float freq) {
    float factor = (float)r->factor, low = (float)r->low_freq_factor;
    float span = (float)(r->high_freq_factor - r->low_freq_factor);
    float wavelen = 1.0f / freq * (float)(2 * 3.14159265358979323846); /* positions to a full turn */
    if (wavelen > (float)(r->original_len / r->low_freq_factor)) return freq / factor;
    if (wavelen < (float)(r->original_len / r->high_freq_factor)) return freq;
    float keep = (1.0f / wavelen * (float)r->original_len - low) / span;
    return (1.0f - keep) * freq / factor + keep * freq;
}

/* yarn (arXiv 2309.00071): which pair of dimensions turns `rotations` times in original_len; a fraction. */
static double mf_yarn_dimension(const mf_rope *r, int D, double rotations) {
    const double pi = 3.14159265358979323846;
    return D * log(r->original_len / (rotations * 2 * pi)) / (2 * log(r->theta));
}

/* Fast pairs keep their frequency, slow ones are divided by factor, a linear ramp from pair `low` to `high` between. */
static void mf_rope_yarn(const mf_rope *r, int D, float *freq) {
    double low = mf_yarn_dimension(r, D, r->beta_fast), high = mf_yarn_dimension(r, D, r->beta_slow);
    if (!r->fractional) low = floor(low), high = ceil(high);
    low = MAX(low, 0.0), high = MIN(high, (double)(D - 1));
    if (low == high) high += 0.001;
    for (int i = 0; i < D / 2; i++) {
        float pos = powf((float)r->theta, (float)(2 * i) / (float)D);
        float ramp = ((float)i - (float)low) / (float)(high - low);
        float keep = 1.0f - MIN(MAX(ramp, 0.0f), 1.0f);
        freq[i] = 1.0f / ((float)r->factor * pos) * (1.0f - keep) + 1.0f / pos * keep;
    }
}

/* The factor on cos and sin, in place of a temperature: 0.1 ln(factor) + 1, or the quotient of two such with weights. */
static double mf_yarn_scale(const mf_rope *r) {
    double ln = r->factor > 1 ? log(r->factor) : 0;
    if (r->attention_factor > 0) return r->attention_factor;
    if (r->mscale != 0 && r->mscale_all_dim != 0) return (0.1 * r->mscale * ln + 1) / (0.1 * r->mscale_all_dim * ln + 1);
    return 0.1 * ln + 1;
}

/* freq[D/2] radians per position, *scale on cos and sin. */
static void mf_rope_table(const mf_rope *r, int D, float *freq, float *scale) {
    *scale = r->kind == MF_ROPE_YARN ? (float)mf_yarn_scale(r) : 1;
    for (int i = 0; i < D / 2; i++) {
        freq[i] = 1.0f / powf((float)r->theta, (float)(2 * i) / (float)D);
        if (r->kind == MF_ROPE_LINEAR) freq[i] /= (float)r->factor;
        if (r->kind == MF_ROPE_LLAMA3) freq[i] = mf_rope_llama3(r, freq[i]);
    }
    if (r->kind == MF_ROPE_YARN) mf_rope_yarn(r, D, freq);
}

/* ---- Reading the fields of a JSON object: the first thing wrong sticks, later reads return their default ---- */

typedef struct mf_reader {
    const json *o;     /* the object; NULL: every field is missing */
    const char *where; /* file, for messages */
    const char *path;  /* "" or "rope_parameters." ... in front of a field's name */
    toka_err *e;       /* code 0 until something is wrong, then that of the first error */
} mf_reader;

/* A value as a message shows it. */
static const char *mf_show(const json *v, char z[80]) {
    if (!v) snprintf(z, 80, "missing");
    else if (v->type == JSON_STRING) snprintf(z, 80, "\"%.*s\"", (int)MIN(v->n, 60u), v->s);
    else if (v->type == JSON_NUMBER && v->exact) snprintf(z, 80, "%lld", (long long)v->i);
    else if (v->type == JSON_NUMBER) snprintf(z, 80, "%g", v->f);
    else
        snprintf(z, 80, "%s", (const char *const[]){"null", "false", "true", "", "", "an array", "an object"}[v->type]);
    return z;
}

/* "config.json: hidden_size is "big", expected a whole number" */
static void mf_bad(mf_reader *r, const char *name, const json *v, const char *expected) {
    char z[80];
    if (r->e->code) return;
    fail(r->e, TOKA_E_INPUT, "%s: %s%s is %s, expected %s", r->where, r->path, name, mf_show(v, z), expected);
}

static const json *mf_field(const mf_reader *r, const char *name) { /* NULL if absent or null */
    const json *v = json_get(r->o, name);
    return json_is(v, JSON_NULL) ? NULL : v;
}
static int64_t mf_int(mf_reader *r, const char *name, int64_t otherwise) {
    const json *v = mf_field(r, name);
    if (!v) return otherwise;
    if (v->type == JSON_NUMBER && v->exact) return v->i;
    return mf_bad(r, name, v, "a whole number"), otherwise;
}
static double mf_num(mf_reader *r, const char *name, double otherwise, double min, double max) {
    const json *v = mf_field(r, name);
    char z[80];
    if (!v) return otherwise;
    double f = json_num(v, NAN);
    if (f >= min && f <= max) return f;
    snprintf(z, sizeof z, "a number from %g to %g", min, max);
    return mf_bad(r, name, v, z), otherwise;
}
static bool mf_bool(mf_reader *r, const char *name, bool otherwise) {
    const json *v = mf_field(r, name);
    if (!v) return otherwise;
    if (v->type != JSON_TRUE && v->type != JSON_FALSE) mf_bad(r, name, v, "true or false");
    return v->type == JSON_TRUE;
}

/* A text as a JSON object; NULL: *e says what is wrong, `where` in front. */
static const json *mf_json(str text, const char *where, arena *a, json_limits limits, toka_err *e) {
    const json *o = json_parse(a, text, limits, e);
    if (!o) {
        toka_err inner = *e;
        fail(e, inner.code, "%s: %.440s", where, inner.msg);
    } else if (o->type != JSON_OBJECT) {
        fail(e, TOKA_E_INPUT, "%s: not a JSON object", where);
        o = NULL;
    }
    return o;
}

/* ---- config.json: the shape ---- */

static const json_limits mf_json_limits = {32, (size_t)1 << 24}; /* for configs, which are a few KB */

/* The numbers of a shape, in the order in which config.json and models.txt give them to mf_set_dims. The limits keep every
 * product of two dimensions within int64, and H*D within int. */
enum { MF_L, MF_E, MF_H, MF_K, MF_D, MF_F, MF_V, MF_LEN, MF_N_DIMS };
static const struct {
    const char *letter, *field;
    int64_t max;
} mf_dims[MF_N_DIMS] = {
    {"L", "num_hidden_layers", 4096},      {"E", "hidden_size", 1 << 20},   {"H", "num_attention_heads", 1 << 14},
    {"K", "num_key_value_heads", 1 << 14}, {"D", "head_dim", 1 << 14},      {"F", "intermediate_size", 1 << 24},
    {"V", "vocab_size", 1 << 26},          {"max_len", "max_position_embeddings", 1 << 30},
};

/* The architectures, and what transformers takes for a field that is not there. Common to all: L 32, H 32, rms_norm_eps
 * 1e-6, rope_theta 10000, hidden_act silu, attention_bias and tie_word_embeddings false. */
typedef struct mf_arch {
    const char *name, *model_type;
    unsigned features;          /* always there */
    unsigned attention_bias;    /* what the field attention_bias brings; 0: the field is ignored */
    int E, F, V, max_len;
    int K;                      /* 0: as H. A K that is null is H everywhere */
    int D;                      /* 0: E / H */
    int window;                 /* sliding_window */
    bool window_asks;           /* the window counts only with use_sliding_window, and by layer */
    int bos, eos;               /* -1: none */
} mf_arch;

static const mf_arch mf_archs[] = {
    {.name = "LlamaForCausalLM", .model_type = "llama", .attention_bias = MF_QKV_BIAS | MF_O_BIAS, .E = 4096, .F = 11008,
     .V = 32000, .max_len = 2048, .bos = 1, .eos = 2},
    {.name = "MistralForCausalLM", .model_type = "mistral", .E = 4096, .F = 14336, .V = 32000, .max_len = 131072, .K = 8,
     .window = 4096, .bos = 1, .eos = 2},
    {.name = "Qwen2ForCausalLM", .model_type = "qwen2", .features = MF_QKV_BIAS, .E = 4096, .F = 22016, .V = 151936,
     .max_len = 32768, .K = 32, .window = 4096, .window_asks = true, .bos = -1, .eos = -1},
    {.name = "Qwen3ForCausalLM", .model_type = "qwen3", .features = MF_QK_NORM, .attention_bias = MF_QKV_BIAS | MF_O_BIAS,
     .E = 4096, .F = 22016, .V = 151936, .max_len = 32768, .K = 32, .D = 128, .window = 4096, .window_asks = true,
     .bos = -1, .eos = -1},
};

static const mf_arch *mf_arch_by_name(str name) {
    for (int i = 0; i < COUNT(mf_archs); i++)
        if (str_is(name, mf_archs[i].name)) return &mf_archs[i];
    return NULL;
}

static void mf_read_arch(mf_reader *r, mf_config *c) {
    const json *list = mf_field(r, "architectures"), *first = json_at(list, 0);
    const char *const known = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM";
    if (first) {
        c->arch = mf_arch_by_name(json_str(first));
        if (!c->arch) mf_bad(r, "architectures[0]", first, known);
        return;
    }
    const json *type = mf_field(r, "model_type"); /* what names the architecture when nobody saved a model with it */
    for (int i = 0; type && i < COUNT(mf_archs); i++)
        if (str_is(json_str(type), mf_archs[i].model_type)) c->arch = &mf_archs[i];
    if (!c->arch) mf_bad(r, list ? "architectures" : "model_type", list ? list : type, known);
}

/* Checks the numbers of a shape and stores them. */
static int mf_set_dims(mf_config *c, const int64_t dim[MF_N_DIMS], const char *where, toka_err *e) {
    for (int i = 0; i < MF_N_DIMS; i++)
        if (dim[i] < 1 || dim[i] > mf_dims[i].max)
            return fail(e, TOKA_E_INPUT, "%s: %s (%s) is %lld, expected 1 to %lld", where, mf_dims[i].field,
                        mf_dims[i].letter, (long long)dim[i], (long long)mf_dims[i].max);
    if (dim[MF_D] % 2)
        return fail(e, TOKA_E_INPUT, "%s: head_dim (D) is %lld, expected an even number", where, (long long)dim[MF_D]);
    if (dim[MF_H] % dim[MF_K])
        return fail(e, TOKA_E_INPUT,
                    "%s: num_attention_heads (H) is %lld, expected a multiple of num_key_value_heads (K), %lld", where,
                    (long long)dim[MF_H], (long long)dim[MF_K]);
    toka_shape *s = &c->shape;
    s->L = (int)dim[MF_L], s->E = (int)dim[MF_E], s->H = (int)dim[MF_H], s->K = (int)dim[MF_K];
    s->D = (int)dim[MF_D], s->F = (int)dim[MF_F], s->V = s->V_all = (int)dim[MF_V], s->max_len = (int)dim[MF_LEN];
    return 0;
}

static void mf_read_dims(mf_reader *r, mf_config *c) {
    const mf_arch *a = c->arch;
    int64_t dim[MF_N_DIMS];
    dim[MF_L] = mf_int(r, "num_hidden_layers", 32);
    dim[MF_E] = mf_int(r, "hidden_size", a->E);
    dim[MF_H] = mf_int(r, "num_attention_heads", 32);
    bool as_H = !a->K || json_is(json_get(r->o, "num_key_value_heads"), JSON_NULL);
    dim[MF_K] = mf_int(r, "num_key_value_heads", as_H ? dim[MF_H] : a->K);
    bool divides = dim[MF_H] > 0 && dim[MF_E] % dim[MF_H] == 0;
    dim[MF_D] = mf_int(r, "head_dim", a->D ? a->D : divides ? dim[MF_E] / dim[MF_H] : -1);
    dim[MF_F] = mf_int(r, "intermediate_size", a->F);
    dim[MF_V] = mf_int(r, "vocab_size", a->V);
    dim[MF_LEN] = mf_int(r, "max_position_embeddings", a->max_len);
    c->shape.eps = (float)mf_num(r, "rms_norm_eps", 1e-6, 0, 1);
    if (r->e->code) return;
    if (dim[MF_D] == -1 && !mf_field(r, "head_dim") && dim[MF_H] > 0)
        fail(r->e, TOKA_E_INPUT, "%s: hidden_size is %lld, expected a multiple of num_attention_heads, %lld, or a head_dim",
             r->where, (long long)dim[MF_E], (long long)dim[MF_H]);
    else
        mf_set_dims(c, dim, r->where, r->e);
}

/* Fields that would change the result in a way toka does not compute: only off is taken. */
static void mf_refuse(mf_reader *r) {
    static const struct {
        const char *field, *expected;
    } off[] = {
        {"mlp_bias", "false: a bias in the MLP is not supported"},
        {"quantization_config", "none: quantized weights are not supported"},
        {"compression_config", "none: quantized weights are not supported"},
        {"attn_logit_softcapping", "none: soft-capped logits are not supported"},
        {"final_logit_softcapping", "none: soft-capped logits are not supported"},
        {"num_local_experts", "none: mixtures of experts are not supported"},
        {"num_experts", "none: mixtures of experts are not supported"},
        {"n_routed_experts", "none: mixtures of experts are not supported"},
    };
    for (int i = 0; i < COUNT(off); i++) {
        const json *v = mf_field(r, off[i].field);
        if (v && v->type != JSON_FALSE && json_num(v, 1) != 0) mf_bad(r, off[i].field, v, off[i].expected);
    }
    const json *act = mf_field(r, "hidden_act");
    if (act && !str_is(json_str(act), "silu") && !str_is(json_str(act), "swish")) mf_bad(r, "hidden_act", act, "\"silu\"");
}

/* ---- config.json: RoPE and windows ---- */

static const char *const mf_layer_types[] = {"full_attention", "sliding_attention"};

static mf_rope_kind mf_read_rope_kind(mf_reader *r) {
    const json *v = mf_field(r, "rope_type");
    const char *name = v ? "rope_type" : "type"; /* its name in old files */
    if (!v) v = mf_field(r, "type");
    for (int i = 0; v && i < COUNT(mf_rope_names); i++)
        if (str_is(json_str(v), mf_rope_names[i])) return (mf_rope_kind)i;
    if (v) mf_bad(r, name, v, "default, linear, llama3 or yarn");
    return MF_ROPE_DEFAULT;
}

/* original_max_position_embeddings: that of config.json itself, else that of the RoPE object, else the model's length. */
static double mf_read_original_len(mf_reader *top, mf_reader *r, int max_len) {
    const char *const field = "original_max_position_embeddings";
    return mf_num(mf_field(top, field) ? top : r, field, max_len, 1, 1 << 30);
}

static void mf_read_rope_scaling(mf_reader *top, mf_reader *r, const mf_config *c, mf_rope *rope) {
    if (rope->kind != MF_ROPE_YARN && !mf_field(r, "factor")) mf_bad(r, "factor", NULL, "a number");
    if (rope->kind == MF_ROPE_LINEAR) {
        rope->factor = mf_num(r, "factor", 1, 1e-3, 1e6);
        return;
    }
    rope->original_len = mf_read_original_len(top, r, c->shape.max_len);
    rope->factor = mf_num(r, "factor", c->shape.max_len / rope->original_len, 1e-3, 1e6);
    if (rope->kind == MF_ROPE_LLAMA3) {
        rope->low_freq_factor = mf_num(r, "low_freq_factor", 0, 1e-3, 1e6);
        rope->high_freq_factor = mf_num(r, "high_freq_factor", 0, 1e-3, 1e6);
        if (rope->low_freq_factor == 0) mf_bad(r, "low_freq_factor", NULL, "a number");
        if (rope->high_freq_factor <= rope->low_freq_factor)
            mf_bad(r, "high_freq_factor", mf_field(r, "high_freq_factor"), "more than low_freq_factor");
        return;
    }
    rope->attention_factor = mf_num(r, "attention_factor", 0, 1e-6, 1e6);
    rope->mscale = mf_num(r, "mscale", 0, 0, 1e3);
    rope->mscale_all_dim = mf_num(r, "mscale_all_dim", 0, 0, 1e3);
    rope->beta_fast = mf_num(r, "beta_fast", 32, 0, 1e6);
    rope->beta_slow = mf_num(r, "beta_slow", 1, 0, 1e6);
    if (rope->beta_fast == 0) rope->beta_fast = 32; /* 0 means not given, as in transformers */
    if (rope->beta_slow == 0) rope->beta_slow = 1;
    rope->fractional = !mf_bool(r, "truncate", true);
}

/* RoPE stands in rope_scaling with rope_theta beside it (transformers 4) or all in rope_parameters (5); the first wins. */
static void mf_read_rope(mf_reader *top, mf_config *c) {
    const char *name = "rope_scaling", *path = "rope_scaling.";
    const json *o = mf_field(top, name);
    if (!o || (o->type == JSON_OBJECT && o->n == 0)) o = mf_field(top, name = "rope_parameters"), path = "rope_parameters.";
    if (o && o->type != JSON_OBJECT) mf_bad(top, name, o, "an object");
    if (top->e->code) return;
    mf_reader in = *top, *r = &in;
    r->o = o, r->path = path;
    for (int i = 0; o && i < COUNT(mf_layer_types); i++)
        if (mf_field(r, mf_layer_types[i]))
            mf_bad(r, mf_layer_types[i], mf_field(r, mf_layer_types[i]), "none: one RoPE for all layers");
    mf_rope *rope = &c->rope;
    rope->kind = mf_read_rope_kind(r);
    rope->theta = mf_num(mf_field(r, "rope_theta") ? r : top, "rope_theta", 10000, 1.0001, 1e18);
    mf_reader *partial = mf_field(r, "partial_rotary_factor") ? r : top;
    if (mf_num(partial, "partial_rotary_factor", 1, 0, 1) != 1)
        mf_bad(partial, "partial_rotary_factor", mf_field(partial, "partial_rotary_factor"), "1: the whole head rotates");
    if (rope->kind != MF_ROPE_DEFAULT) mf_read_rope_scaling(top, r, c, rope);
    if (rope->kind == MF_ROPE_YARN) /* what it stretches to; max_position_embeddings often still says the original length */
        c->shape.max_len = (int)MAX(c->shape.max_len, MIN(rope->original_len * rope->factor, (double)mf_dims[MF_LEN].max));
}

/* The window of each layer. Mistral: one for all. Qwen, if it asks for windows: layer_types says which layers, else those
 * from max_window_layers on. */
static void mf_read_windows(mf_reader *r, mf_config *c, arena *a) {
    int L = c->shape.L;
    c->window = arena_zalloc(a, (size_t)L * sizeof *c->window);
    bool none = !c->arch->window || json_is(json_get(r->o, "sliding_window"), JSON_NULL);
    if (c->arch->window_asks && !mf_bool(r, "use_sliding_window", false)) none = true;
    int64_t window = none ? 0 : mf_int(r, "sliding_window", c->arch->window);
    if (!none && (window < 1 || window > mf_dims[MF_LEN].max))
        mf_bad(r, "sliding_window", mf_field(r, "sliding_window"), "1 or more tokens, or null");
    int64_t from = c->arch->window_asks ? mf_int(r, "max_window_layers", 28) : 0;
    for (int i = 0; i < L; i++) c->window[i] = i >= from ? (int)window : 0;

    const json *types = c->arch->window_asks ? mf_field(r, "layer_types") : NULL;
    if (types && (types->type != JSON_ARRAY || types->n != (uint32_t)L))
        mf_bad(r, "layer_types", types, "a list with one for each layer");
    for (int i = 0; types && !r->e->code && i < L; i++) {
        const json *type = json_at(types, (size_t)i);
        bool slides = str_is(json_str(type), mf_layer_types[1]);
        if (!slides && !str_is(json_str(type), mf_layer_types[0]))
            mf_bad(r, "layer_types", type, "\"full_attention\" or \"sliding_attention\"");
        if (slides && !window) mf_bad(r, "layer_types", type, "\"full_attention\", as there is no window");
        c->window[i] = slides ? (int)window : 0;
    }
}

/* ---- config.json: end ids, and the whole ---- */

/* A token id or a list of them. Ids that the vocabulary does not have can never be drawn and are left out. */
static void mf_read_ids(mf_reader *r, const char *name, int V, arena *a, int32_t **list, int *n) {
    const json *v = mf_field(r, name);
    if (!v) return;
    size_t most = v->type == JSON_ARRAY ? v->n : 1;
    *list = arena_alloc(a, most * sizeof **list);
    *n = 0;
    for (size_t i = 0; i < most; i++) {
        const json *it = v->type == JSON_ARRAY ? v + 1 + i : v; /* numbers are one node each; the first other ends it */
        if (it->type != JSON_NUMBER || !it->exact) {
            mf_bad(r, name, it, "a token id or a list of them");
            return;
        }
        if (it->i >= 0 && it->i < V) (*list)[(*n)++] = (int32_t)it->i;
    }
}

static int32_t mf_read_id(mf_reader *r, const char *name, int otherwise, int V) {
    int64_t id = mf_int(r, name, otherwise);
    return id >= 0 && id < V ? (int32_t)id : -1;
}

static void mf_finish_rope(mf_config *c, arena *a) {
    float *freq = arena_alloc(a, (size_t)(c->shape.D / 2) * sizeof *freq);
    mf_rope_table(&c->rope, c->shape.D, freq, &c->shape.rope_scale);
    c->shape.rope_freq = freq;
}

/* config.json to *c; what c points to lives in `a`. */
static int mf_config_parse(str text, const char *where, arena *a, mf_config *c, toka_err *e) {
    *c = (mf_config){0};
    *e = (toka_err){0};
    const json *o = mf_json(text, where, a, mf_json_limits, e);
    if (!o) return e->code;
    mf_reader reader = {.o = o, .where = where, .path = "", .e = e}, *r = &reader;
    mf_read_arch(r, c);
    mf_refuse(r);
    if (e->code) return e->code;
    mf_read_dims(r, c);
    if (e->code) return e->code;
    mf_read_rope(r, c);
    mf_read_windows(r, c, a);
    c->features = c->arch->features;
    if (c->arch->attention_bias && mf_bool(r, "attention_bias", false)) c->features |= c->arch->attention_bias;
    if (!mf_bool(r, "tie_word_embeddings", false)) c->features |= MF_LM_HEAD;
    c->bos_id = mf_read_id(r, "bos_token_id", json_get(o, "bos_token_id") ? -1 : c->arch->bos, c->shape.V);
    if (c->arch->eos >= 0 && !json_get(o, "eos_token_id")) {
        c->eos_ids = arena_alloc(a, sizeof *c->eos_ids);
        c->eos_ids[0] = c->arch->eos;
        c->n_eos_ids = c->arch->eos < c->shape.V;
    }
    mf_read_ids(r, "eos_token_id", c->shape.V, a, &c->eos_ids, &c->n_eos_ids);
    if (!e->code) mf_finish_rope(c, a);
    return e->code;
}

/* generation_config.json: its begin and end ids replace those in *c where it has any; sampling defaults go to *d. */
static int mf_generation_parse(str text, const char *where, arena *a, mf_config *c, mf_defaults *d, toka_err *e) {
    *d = mf_no_defaults;
    *e = (toka_err){0};
    const json *o = mf_json(text, where, a, mf_json_limits, e);
    if (!o) return e->code;
    mf_reader reader = {.o = o, .where = where, .path = "", .e = e}, *r = &reader;
    c->bos_id = mf_read_id(r, "bos_token_id", c->bos_id, c->shape.V);
    mf_read_ids(r, "eos_token_id", c->shape.V, a, &c->eos_ids, &c->n_eos_ids);
    d->has_do_sample = mf_field(r, "do_sample"), d->do_sample = mf_bool(r, "do_sample", false);
    d->has_temperature = mf_field(r, "temperature"), d->temperature = (float)mf_num(r, "temperature", 1, 0, 1e3);
    d->has_top_p = mf_field(r, "top_p"), d->top_p = (float)mf_num(r, "top_p", 1, 0, 1);
    d->has_min_p = mf_field(r, "min_p"), d->min_p = (float)mf_num(r, "min_p", 0, 0, 1);
    d->has_repetition_penalty = mf_field(r, "repetition_penalty");
    d->repetition_penalty = (float)mf_num(r, "repetition_penalty", 1, 1e-3, 1e3);
    int64_t top_k = mf_int(r, "top_k", 0);
    d->has_top_k = mf_field(r, "top_k"), d->top_k = (int)MIN(MAX(top_k, 0), (int64_t)INT_MAX);
    return e->code;
}

/* ---- tokenizer_config.json: what the chat template sees ---- */

static char *mf_special(mf_reader *r, const char *name, arena *a) { /* "<s>" or {"content": "<s>", ...} */
    const json *v = mf_field(r, name);
    if (json_is(v, JSON_OBJECT)) v = json_get(v, "content");
    if (v && v->type != JSON_STRING) mf_bad(r, name, v, "a string or an object with content");
    return json_is(v, JSON_STRING) ? arena_cstr(a, json_str(v)) : NULL;
}

/* A template by name: of a list of {"name", "template"}; a string is "default". */
static str mf_template(mf_reader *r, const char *name, arena *a) {
    const json *v = mf_field(r, "chat_template");
    if (json_is(v, JSON_ARRAY)) {
        const json *list = v;
        v = NULL;
        JSON_EACH(it, list) if (str_is(json_str(json_get(it, "name")), name)) v = json_get(it, "template");
    } else if (strcmp(name, "default")) {
        return STR("");
    }
    if (v && v->type != JSON_STRING) mf_bad(r, "chat_template", v, "a string or a list of named ones");
    return json_is(v, JSON_STRING) ? arena_str(a, json_str(v)) : STR("");
}

static int mf_tokenizer_config_parse(str text, const char *where, arena *a, mf_model *m, toka_err *e) {
    *e = (toka_err){0};
    arena tmp = {0}; /* the nodes: these files hold hundreds of added tokens */
    const json *o = mf_json(text, where, &tmp, json_trusted, e);
    if (o) {
        mf_reader reader = {.o = o, .where = where, .path = "", .e = e}, *r = &reader;
        m->bos_token = mf_special(r, "bos_token", a), m->eos_token = mf_special(r, "eos_token", a);
        m->pad_token = mf_special(r, "pad_token", a), m->unk_token = mf_special(r, "unk_token", a);
        m->chat_template = mf_template(r, "default", a), m->tool_template = mf_template(r, "tool_use", a);
    }
    arena_free(&tmp);
    return e->code;
}

/* ---- safetensors ----
 * A file is: 8 bytes, little-endian, the length of the header; the header, a JSON object padded with spaces; the data.
 * The header maps each tensor's name to {"dtype", "shape", "data_offsets": [begin, end]}, offsets counted from the data's
 * first byte, and may hold "__metadata__" with strings. As the reference reader demands: in the order of their offsets the
 * tensors follow each other without a hole or an overlap, from 0 to the end of the file. */

#define ST_MAX_HEADER 100000000 /* bytes, as in the reference */
#define ST_MAX_FILES 1024       /* shards of one model */

typedef struct st_dtype {
    const char *name;
    int bits;
    int toka; /* toka_dtype, or -1: a type that may lie in the file but not be used */
} st_dtype;

static const st_dtype st_dtypes[] = {
    {"BF16", 16, TOKA_BF16}, {"F16", 16, TOKA_F16}, {"F32", 32, TOKA_F32}, {"F64", 64, -1},     {"I64", 64, -1},
    {"U64", 64, -1},         {"I32", 32, -1},       {"U32", 32, -1},       {"I16", 16, -1},     {"U16", 16, -1},
    {"I8", 8, -1},           {"U8", 8, -1},         {"BOOL", 8, -1},       {"F8_E5M2", 8, -1},  {"F8_E4M3", 8, -1},
    {"F8_E8M0", 8, -1},      {"F8_E4M3FNUZ", 8, -1}, {"F8_E5M2FNUZ", 8, -1}, {"F6_E2M3", 6, -1}, {"F6_E3M2", 6, -1},
    {"F4", 4, -1},           {"C64", 64, -1},
};

typedef struct st_tensor {
    str name;
    const char *file; /* for messages */
    const st_dtype *dtype;
    int n_dims;
    int64_t dims[2];      /* the first two; what toka uses has no more */
    uint64_t begin, end;  /* in the file's data */
    const char *data;
} st_tensor;

/* bits = product of the shape times the dtype's; false when that overflows or the shape is not a list of counts. */
static bool st_shape(const json *shape, st_tensor *t, uint64_t *bits) {
    *bits = (uint64_t)t->dtype->bits;
    if (!json_is(shape, JSON_ARRAY)) return false;
    bool empty = false, over = false;
    JSON_EACH(it, shape) {
        if (it->type != JSON_NUMBER || !it->exact || it->i < 0) return false;
        if (t->n_dims < COUNT(t->dims)) t->dims[t->n_dims] = it->i;
        t->n_dims++;
        empty = empty || it->i == 0;
        over = over || (it->i && *bits > INT64_MAX / (uint64_t)it->i);
        if (!over && it->i) *bits *= (uint64_t)it->i;
    }
    if (empty) *bits = 0;
    return !over;
}

/* One member of the header: name and description to *t. */
static int st_read(const json *key, const char *file, st_tensor *t, toka_err *e) {
    const json *o = key + 1, *at = json_get(o, "data_offsets"), *begin = json_at(at, 0), *end = json_at(at, 1);
    const str name = {key->s, key->n}, type = json_str(json_get(o, "dtype"));
    *t = (st_tensor){.name = name, .file = file};
    for (int i = 0; i < COUNT(st_dtypes); i++)
        if (str_is(type, st_dtypes[i].name)) t->dtype = &st_dtypes[i];
    if (!t->dtype) return fail(e, TOKA_E_INPUT, "%s: %.*s: dtype \"%.*s\" is not known", file, STRF(name), STRF(type));
    uint64_t bits;
    if (!st_shape(json_get(o, "shape"), t, &bits))
        return fail(e, TOKA_E_INPUT, "%s: %.*s: shape is not a list of counts with a product below 2^60", file, STRF(name));
    if (!at || at->type != JSON_ARRAY || at->n != 2 || json_int(begin, -1) < 0 || json_int(end, -1) < json_int(begin, -1))
        return fail(e, TOKA_E_INPUT, "%s: %.*s: data_offsets are not [begin, end]", file, STRF(name));
    t->begin = (uint64_t)begin->i, t->end = (uint64_t)end->i;
    if (bits % 8 || bits / 8 != t->end - t->begin)
        return fail(e, TOKA_E_INPUT, "%s: %.*s: data_offsets span %llu bytes, shape and dtype need %llu", file, STRF(name),
                    (unsigned long long)(t->end - t->begin), (unsigned long long)((bits + 7) / 8));
    return 0;
}

static int st_by_offset(const void *a, const void *b) {
    const st_tensor *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* Sorts by offset; refuses holes, overlaps and what is outside `data`. */
static int st_place(st_tensor *t, int n, str data, const char *file, toka_err *e) {
    qsort(t, (size_t)n, sizeof *t, st_by_offset);
    uint64_t at = 0;
    for (int i = 0; i < n; i++) {
        if (t[i].end > data.n)
            return fail(e, TOKA_E_INPUT, "%s: %.*s: data_offsets [%llu,%llu] lie outside the file's %zu bytes of data",
                        file, STRF(t[i].name), (unsigned long long)t[i].begin, (unsigned long long)t[i].end, data.n);
        if (t[i].begin != at)
            return fail(e, TOKA_E_INPUT, "%s: %.*s: data_offsets begin at %llu, expected %llu, %s", file, STRF(t[i].name),
                        (unsigned long long)t[i].begin, (unsigned long long)at,
                        t[i].begin < at ? "they overlap another tensor" : "there is a hole before them");
        at = t[i].end;
        t[i].data = data.p + t[i].begin;
    }
    if (at != data.n)
        return fail(e, TOKA_E_INPUT, "%s: the tensors end at byte %llu of the data, which has %zu", file,
                    (unsigned long long)at, data.n);
    return 0;
}

/* A file's bytes to its tensors, in the order of their offsets. The list lives in `a`, names there or in the file. */
static int st_parse(str text, const char *file, arena *a, st_tensor **out, int *n, toka_err *e) {
    uint64_t header = 0;
    *n = 0;
    if (text.n < 8) return fail(e, TOKA_E_INPUT, "%s: %zu bytes, expected at least 8", file, text.n);
    for (int i = 7; i >= 0; i--) header = header << 8 | (unsigned char)text.p[i];
    if (header > ST_MAX_HEADER)
        return fail(e, TOKA_E_INPUT, "%s: header of %llu bytes, expected at most %d", file, (unsigned long long)header,
                    ST_MAX_HEADER);
    if (header > text.n - 8)
        return fail(e, TOKA_E_INPUT, "%s: header of %llu bytes, but the file ends after %zu", file,
                    (unsigned long long)header, text.n - 8);
    if (!header || text.p[8] != '{') return fail(e, TOKA_E_INPUT, "%s: the header does not begin with {", file);
    const json_limits limits = {3, ST_MAX_HEADER};
    const json *o = mf_json(str_sub(text, 8, 8 + (size_t)header), file, a, limits, e);
    if (!o) return e->code;
    st_tensor *t = *out = arena_alloc(a, o->n * sizeof *t);
    JSON_MEMBERS(key, o) {
        if (str_is((str){key->s, key->n}, "__metadata__")) {
            bool strings = key[1].type == JSON_OBJECT;
            if (strings) JSON_MEMBERS(k, key + 1) strings = strings && k[1].type == JSON_STRING;
            if (!strings) return fail(e, TOKA_E_INPUT, "%s: __metadata__ is not an object of strings", file);
        } else if (st_read(key, file, &t[(*n)++], e)) {
            return e->code;
        }
    }
    return st_place(t, *n, str_sub(text, 8 + (size_t)header, text.n), file, e);
}

/* model.safetensors.index.json to the list of its files, each once. Only plain names pass: no path leaves the folder. */
static int st_index_parse(str text, const char *where, arena *a, str **files, int *n, toka_err *e) {
    const json *o = mf_json(text, where, a, json_trusted, e), *map = json_get(o, "weight_map");
    *n = 0;
    if (!o) return e->code;
    if (!json_is(map, JSON_OBJECT)) return fail(e, TOKA_E_INPUT, "%s: there is no weight_map", where);
    *files = arena_alloc(a, ST_MAX_FILES * sizeof **files);
    JSON_MEMBERS(key, map) {
        const str name = json_str(key + 1);
        int i = *n - 1;
        while (i >= 0 && !str_eq((*files)[i], name)) i--;
        if (i >= 0) continue;
        if (!name.n || name.n > 255 || name.p[0] == '.' || memchr(name.p, '/', name.n) || memchr(name.p, 0, name.n) ||
            !str_ends(name, STR(".safetensors")))
            return fail(e, TOKA_E_INPUT, "%s: weight_map names \"%.*s\", expected a plain name that ends in .safetensors",
                        where, STRF(name));
        if (*n == ST_MAX_FILES) return fail(e, TOKA_E_INPUT, "%s: more than %d files", where, ST_MAX_FILES);
        (*files)[(*n)++] = name;
    }
    return 0;
}

/* ---- All tensors of a model by name: open addressing, at most half full ---- */

typedef struct st_set { /* heap; the tensors themselves are borrowed */
    const st_tensor **slot;
    size_t n, cap; /* cap: a power of two or 0 */
} st_set;

static void st_set_free(st_set *s) {
    free(s->slot);
    *s = (st_set){0};
}

/* Where `name` is, or where it would go. cap > n, so the walk ends. */
static const st_tensor **st_set_slot(const st_set *s, str name) {
    size_t i = hash_bytes(name.p, name.n) & (s->cap - 1);
    while (s->slot[i] && !str_eq(s->slot[i]->name, name)) i = (i + 1) & (s->cap - 1);
    return &s->slot[i];
}

static const st_tensor *st_set_get(const st_set *s, const char *name) {
    return s->cap ? *st_set_slot(s, str_c(name)) : NULL;
}

static int st_set_add(st_set *s, const st_tensor *t, toka_err *e) {
    if (s->n * 2 >= s->cap) {
        st_set old = *s;
        *s = (st_set){.n = old.n, .cap = MAX(old.cap * 2, (size_t)64)};
        s->slot = mem_zalloc(s->cap * sizeof *s->slot);
        for (size_t i = 0; i < old.cap; i++)
            if (old.slot[i]) *st_set_slot(s, old.slot[i]->name) = old.slot[i];
        st_set_free(&old);
    }
    const st_tensor **at = st_set_slot(s, t->name);
    if (*at && (*at)->file == t->file)
        return fail(e, TOKA_E_INPUT, "%s: %.*s is there twice", t->file, STRF(t->name));
    if (*at)
        return fail(e, TOKA_E_INPUT, "%.*s is in two files, %s and %s", STRF(t->name), (*at)->file, t->file);
    *at = t;
    s->n++;
    return 0;
}

/* ---- Binding: the names of a checkpoint, and the field and shape of each ---- */

typedef struct mf_slot {
    const char *suffix;      /* the name behind "model.layers.7." or "model." */
    size_t field;            /* offset of a toka_tensor in toka_layer, or in toka_weights */
    const char *rows, *cols; /* letters whose product it is; rows "": a vector, one dimension in the file */
    unsigned needs;          /* 0, or the feature that brings it */
} mf_slot;

static const mf_slot mf_layer_slots[] = {
    {"input_layernorm.weight", offsetof(toka_layer, attn_norm), "", "E", 0},
    {"self_attn.q_proj.weight", offsetof(toka_layer, q), "HD", "E", 0},
    {"self_attn.k_proj.weight", offsetof(toka_layer, k), "KD", "E", 0},
    {"self_attn.v_proj.weight", offsetof(toka_layer, v), "KD", "E", 0},
    {"self_attn.q_proj.bias", offsetof(toka_layer, q_bias), "", "HD", MF_QKV_BIAS},
    {"self_attn.k_proj.bias", offsetof(toka_layer, k_bias), "", "KD", MF_QKV_BIAS},
    {"self_attn.v_proj.bias", offsetof(toka_layer, v_bias), "", "KD", MF_QKV_BIAS},
    {"self_attn.q_norm.weight", offsetof(toka_layer, q_norm), "", "D", MF_QK_NORM},
    {"self_attn.k_norm.weight", offsetof(toka_layer, k_norm), "", "D", MF_QK_NORM},
    {"self_attn.o_proj.weight", offsetof(toka_layer, o), "E", "HD", 0},
    {"self_attn.o_proj.bias", offsetof(toka_layer, o_bias), "", "E", MF_O_BIAS},
    {"post_attention_layernorm.weight", offsetof(toka_layer, mlp_norm), "", "E", 0},
    {"mlp.gate_proj.weight", offsetof(toka_layer, gate), "F", "E", 0},
    {"mlp.up_proj.weight", offsetof(toka_layer, up), "F", "E", 0},
    {"mlp.down_proj.weight", offsetof(toka_layer, down), "E", "F", 0},
};
enum { MF_EMBED, MF_NORM };
static const mf_slot mf_model_slots[] = {
    [MF_EMBED] = {"embed_tokens.weight", offsetof(toka_weights, embed), "V", "E", 0},
    [MF_NORM] = {"norm.weight", offsetof(toka_weights, norm), "", "E", 0},
};
static const mf_slot mf_lm_head_slot = {"lm_head.weight", offsetof(toka_weights, lm_head), "V", "E", MF_LM_HEAD};

static int mf_product(const char *letters, const toka_shape *s) { /* "KD" -> K*D; "" -> 1 */
    int n = 1;
    for (; *letters; letters++) {
        switch (*letters) {
        case 'H': n *= s->H; break;
        case 'K': n *= s->K; break;
        case 'D': n *= s->D; break;
        case 'E': n *= s->E; break;
        case 'F': n *= s->F; break;
        default: n *= s->V;
        }
    }
    return n;
}

static int64_t mf_slot_size(const mf_slot *slot, const mf_config *c) { /* elements; 0 if the model does not have it */
    if (slot->needs & ~c->features) return 0;
    return (int64_t)mf_product(slot->rows, &c->shape) * mf_product(slot->cols, &c->shape);
}

/* Parameters of a model of this shape, a tied output matrix not counted again. */
static int64_t mf_n_parameters(const mf_config *c) {
    int64_t layer = 0, rest = mf_slot_size(&mf_lm_head_slot, c);
    for (int i = 0; i < COUNT(mf_layer_slots); i++) layer += mf_slot_size(&mf_layer_slots[i], c);
    for (int i = 0; i < COUNT(mf_model_slots); i++) rest += mf_slot_size(&mf_model_slots[i], c);
    return layer * c->shape.L + rest;
}

typedef struct mf_binder { /* what stays equal over all tensors of one mf_bind */
    const mf_config *c;
    const st_set *set;
    const char *where;
    toka_weights *w;
    int64_t n_parameters;
    size_t weight_bytes;
} mf_binder;

static void mf_dims_text(const int64_t *dims, int n, char z[64]) { /* "[4096,1024]" */
    if (n == 0) snprintf(z, 64, "[]");
    else if (n == 1) snprintf(z, 64, "[%lld]", (long long)dims[0]);
    else snprintf(z, 64, "[%lld,%lld%s]", (long long)dims[0], (long long)dims[1], n > 2 ? ",..." : "");
}

/* One name to one field; fields of `base`. */
static int mf_bind_one(mf_binder *b, const mf_slot *slot, const char *name, void *base, toka_err *e) {
    if (slot->needs & ~b->c->features) return 0;
    const st_tensor *t = st_set_get(b->set, name);
    if (!t) return fail(e, TOKA_E_INPUT, "%s: missing in %s", name, b->where);
    const int rows = mf_product(slot->rows, &b->c->shape), cols = mf_product(slot->cols, &b->c->shape);
    const int64_t want[2] = {*slot->rows ? rows : cols, cols};
    const int n_dims = *slot->rows ? 2 : 1;
    if (t->n_dims != n_dims || t->dims[0] != want[0] || (n_dims == 2 && t->dims[1] != want[1])) {
        char found[64], expected[64];
        mf_dims_text(t->dims, t->n_dims, found), mf_dims_text(want, n_dims, expected);
        return fail(e, TOKA_E_INPUT, "%s: %s, expected %s", name, found, expected);
    }
    if (t->dtype->toka < 0) return fail(e, TOKA_E_INPUT, "%s: dtype %s, expected BF16, F16 or F32", name, t->dtype->name);
    if ((uintptr_t)t->data % 2) return fail(e, TOKA_E_INPUT, "%s: begins at an odd byte of %s", name, t->file);
    *(toka_tensor *)((char *)base + slot->field) = (toka_tensor){t->data, (toka_dtype)t->dtype->toka, rows, cols, cols};
    b->n_parameters += (int64_t)rows * cols;
    b->weight_bytes += t->end - t->begin;
    return 0;
}

/* Every tensor of the model by its name. A file that was saved from the bare transformer lacks the "model." in front. What
 * the tables do not name (rotary_emb.inv_freq of old files) is left alone. w->layers lives in `a`. */
static int mf_bind(mf_binder *b, arena *a, toka_err *e) {
    char name[128];
    int code;
    const char *prefix = st_set_get(b->set, "embed_tokens.weight") ? "" : "model.";
    *b->w = (toka_weights){.layers = arena_zalloc(a, (size_t)b->c->shape.L * sizeof *b->w->layers)};
    for (int i = 0; i < COUNT(mf_model_slots); i++) {
        snprintf(name, sizeof name, "%s%s", prefix, mf_model_slots[i].suffix);
        if ((code = mf_bind_one(b, &mf_model_slots[i], name, b->w, e)) != 0) return code;
    }
    for (int layer = 0; layer < b->c->shape.L; layer++) {
        for (int i = 0; i < COUNT(mf_layer_slots); i++) {
            snprintf(name, sizeof name, "%slayers.%d.%s", prefix, layer, mf_layer_slots[i].suffix);
            if ((code = mf_bind_one(b, &mf_layer_slots[i], name, &b->w->layers[layer], e)) != 0) return code;
        }
        b->w->layers[layer].window = b->c->window[layer];
    }
    /* A tied model has no lm_head.weight. If the file holds one all the same, transformers uses it when it differs from the
     * embedding; using it always is the same and reads nothing now. */
    mf_slot head = mf_lm_head_slot;
    if (st_set_get(b->set, head.suffix)) head.needs = 0;
    if ((code = mf_bind_one(b, &head, head.suffix, b->w, e)) != 0) return code;
    if (!b->w->lm_head.rows) b->w->lm_head = b->w->embed;
    return 0;
}

/* ---- Ranks: which part of the model each has ---- */

typedef struct mf_rank { /* a place in the grid of stages and tensor ranks; sizes at least 1 */
    int tp_rank, tp_size, pp_rank, pp_size;
} mf_rank;

typedef struct mf_range { /* n of something, from `from` on */
    int from, n;
} mf_range;

static mf_range mf_share(int n, int i, int parts) { /* part i of n things in order: all parts equal, or one apart */
    int from = (int)((int64_t)n * i / parts);
    return (mf_range){from, (int)((int64_t)n * (i + 1) / parts) - from};
}

/* The layers of stage i. Work per token, in multiply-adds: a layer E (H + 2K) D + H D E + 3 E F, the LM head E V, the embedding
 * none. The last stage has the head and gets as many layers as keep the busiest stage least busy; the others share the rest
 * evenly. pp_size <= L. */
static mf_range mf_stage(const toka_shape *s, int i, int pp_size) {
    const double head = (double)s->V_all * s->E;
    const double layer = (double)s->E * ((2.0 * s->H + 2.0 * s->K) * s->D + 3.0 * s->F);
    int others = pp_size - 1, last = s->L - others;
    double least = INFINITY;
    for (int n = last; others && n >= 1; n--) {
        double busiest = MAX((s->L - n + others - 1) / others * layer, n * layer + head);
        if (busiest < least) least = busiest, last = n;
    }
    return i < others ? mf_share(s->L - last, i, others) : (mf_range){s->L - last, last};
}

/* What a rank has of heads, kv heads, mlp columns and vocabulary. Where there are fewer kv heads than ranks, several ranks have
 * the same one, and each some of its query heads. */
typedef struct mf_part {
    mf_range H, K, F, V;
} mf_part;

static int mf_part_of(const toka_shape *s, int tp_rank, int tp_size, mf_part *p, toka_err *e) {
    const int G = s->H / s->K;
    if (tp_size > s->F || tp_size > s->V)
        return fail(e, TOKA_E_USE, "tensor parallel size %d: the model's mlp width is %d and its vocabulary %d, expected no more "
                    "ranks", tp_size, s->F, s->V);
    if (s->K < tp_size && (tp_size % s->K || G % (tp_size / s->K)))
        return fail(e, TOKA_E_USE, "tensor parallel size %d: the model has %d heads and %d kv heads (H, K), expected at most %d "
                    "ranks, or a multiple of K that divides H", tp_size, s->H, s->K, s->K);
    p->K = s->K < tp_size ? (mf_range){tp_rank / (tp_size / s->K), 1} : mf_share(s->K, tp_rank, tp_size);
    p->H = s->K < tp_size ? mf_share(s->H, tp_rank, tp_size) : (mf_range){p->K.from * G, p->K.n * G};
    p->F = mf_share(s->F, tp_rank, tp_size), p->V = mf_share(s->V, tp_rank, tp_size);
    return 0;
}

/* Of `size` rows or columns, described by letters as in mf_slot, those of the part: "KD" -> D for each of its kv heads. */
static mf_range mf_part_range(const mf_part *p, const char *letters, int size, int D) {
    switch (*letters) {
    case 'H': return (mf_range){p->H.from * D, p->H.n * D};
    case 'K': return (mf_range){p->K.from * D, p->K.n * D};
    case 'F': return p->F;
    case 'V': return p->V;
    default: return (mf_range){0, size};
    }
}

/* The part's slice of one tensor; the fields of `from` and `to` are those of the slot. */
static void mf_slice(const mf_slot *slot, const mf_part *p, int D, const void *from, void *to) {
    const toka_tensor *t = (const toka_tensor *)(const void *)((const char *)from + slot->field);
    if (!t->rows) return;
    mf_range rows = mf_part_range(p, slot->rows, t->rows, D), cols = mf_part_range(p, slot->cols, t->cols, D);
    const size_t at = ((size_t)rows.from * (size_t)t->stride + (size_t)cols.from) * (t->dtype == TOKA_F32 ? 4 : 2);
    *(toka_tensor *)(void *)((char *)to + slot->field) =
        (toka_tensor){(const char *)t->data + at, t->dtype, rows.n, cols.n, t->stride};
}

/* The shape and the weights of one rank of a model of this shape: slices of `whole`, nothing is copied. The embedding is in the
 * first stage only, the last norm and the LM head in the last. out->layers lives in `a`. Errors: TOKA_E_USE, it cannot be split
 * so. */
UNUSED static int mf_shard(const toka_shape *s, const toka_weights *whole, const mf_rank *r, arena *a, toka_shape *shape,
                           toka_weights *out, toka_err *e) {
    mf_part p = {0};
    assert(r->tp_rank >= 0 && r->tp_rank < r->tp_size && r->pp_rank >= 0 && r->pp_rank < r->pp_size && s->V == s->V_all);
    if (r->pp_size > s->L)
        return fail(e, TOKA_E_USE, "pipeline parallel size %d: the model has %d layers, expected at least one a stage", r->pp_size,
                    s->L);
    if (mf_part_of(s, r->tp_rank, r->tp_size, &p, e)) return e->code;
    const mf_range layers = mf_stage(s, r->pp_rank, r->pp_size);
    *shape = *s;
    shape->L = layers.n, shape->H = p.H.n, shape->K = p.K.n, shape->F = p.F.n, shape->V = p.V.n, shape->v0 = p.V.from;
    *out = (toka_weights){.layers = arena_zalloc(a, (size_t)layers.n * sizeof *out->layers)};
    for (int l = 0; l < layers.n; l++) {
        const toka_layer *from = &whole->layers[layers.from + l];
        for (int i = 0; i < COUNT(mf_layer_slots); i++) mf_slice(&mf_layer_slots[i], &p, s->D, from, &out->layers[l]);
        out->layers[l].window = from->window;
    }
    if (r->pp_rank == 0) mf_slice(&mf_model_slots[MF_EMBED], &p, s->D, whole, out);
    if (r->pp_rank == r->pp_size - 1) {
        mf_slice(&mf_model_slots[MF_NORM], &p, s->D, whole, out);
        mf_slice(&mf_lm_head_slot, &p, s->D, whole, out);
    }
    return 0;
}

/* ---- models.txt: the known models, a line each, columns separated by spaces, "-" for none; # begins a comment ---- */

typedef struct mf_known {
    char *name, *hub_id;
    char *family;   /* of the chat template: llama3, chatml ...; "-" for a base model */
    char *verified; /* how the line was checked */
    mf_config config;
} mf_known;

enum { MF_COL_NAME, MF_COL_HUB, MF_COL_ARCH, MF_COL_DIMS /* mf_dims without max_len */, MF_COL_TIED = MF_COL_DIMS + MF_LEN,
       MF_COL_THETA, MF_COL_ROPE, MF_COL_EPS, MF_COL_LEN, MF_COL_EXTRAS, MF_COL_FAMILY, MF_COL_VERIFIED, MF_N_COLS };

/* Up to `most` numbers with commas between them; their count, or -1. */
static int mf_numbers(str s, double *out, int most) {
    int n = 0;
    for (size_t from = 0; from <= s.n; n++) {
        ptrdiff_t comma = str_find(s, STR(","), from);
        size_t to = comma < 0 ? s.n : (size_t)comma;
        char z[32], *end;
        if (n == most || to == from || to - from >= sizeof z || !isdigit((unsigned char)s.p[from])) return -1;
        memcpy(z, s.p + from, to - from);
        z[to - from] = 0;
        for (char *d = z; *d; d++)
            if (!isdigit((unsigned char)*d) && !strchr(".e-", *d)) return -1;
            else if (*d == '.') *d = *localeconv()->decimal_point;
        out[n] = strtod(z, &end);
        if (*end) return -1;
        from = to + 1;
    }
    return n;
}

/* "default", "linear:F", "llama3:F,LOW,HIGH,ORIGINAL", "yarn:F,ORIGINAL" */
static bool mf_known_rope(str s, mf_rope *r) {
    static const int n_numbers[] = {0, 1, 4, 2};
    double x[4] = {0};
    for (int kind = 0; kind < COUNT(mf_rope_names); kind++) {
        const str name = str_c(mf_rope_names[kind]);
        if (!str_starts(s, name)) continue;
        r->kind = (mf_rope_kind)kind;
        if (kind == MF_ROPE_DEFAULT) return s.n == name.n;
        if (s.n == name.n || s.p[name.n] != ':') return false;
        if (mf_numbers(str_sub(s, name.n + 1, s.n), x, 4) != n_numbers[kind]) return false;
        r->factor = x[0], r->beta_fast = 32, r->beta_slow = 1;
        r->original_len = kind == MF_ROPE_LLAMA3 ? x[3] : x[1];
        r->low_freq_factor = x[1], r->high_freq_factor = x[2];
        if (r->factor < 1e-3 || r->factor > 1e6) return false; /* the limits of mf_read_rope_scaling */
        if (kind == MF_ROPE_LLAMA3 && (x[1] < 1e-3 || x[2] > 1e6 || x[2] <= x[1])) return false;
        return kind == MF_ROPE_LINEAR || (r->original_len >= 1 && r->original_len <= 1 << 30);
    }
    return false;
}

/* "-", or of qkv_bias, o_bias, qk_norm and window=N those that apply, with commas between them. */
static bool mf_known_extras(str s, mf_config *c, double *window) {
    static const char *const names[] = {"qkv_bias", "o_bias", "qk_norm"};
    *window = 0;
    for (size_t from = 0; from <= s.n && !str_is(s, "-");) {
        ptrdiff_t comma = str_find(s, STR(","), from);
        str word = str_sub(s, from, comma < 0 ? s.n : (size_t)comma);
        from += word.n + 1;
        int i = 0;
        while (i < COUNT(names) && !str_is(word, names[i])) i++;
        if (i < COUNT(names)) c->features |= 1u << i;
        else if (!str_starts(word, STR("window=")) || mf_numbers(str_sub(word, 7, word.n), window, 1) != 1) return false;
    }
    return *window >= 0 && *window <= INT_MAX / 2;
}

/* The columns of one line to *k. `where`: "models.txt line 7". */
static int mf_known_read(const str col[MF_N_COLS], const char *where, arena *a, mf_known *k, toka_err *e) {
    mf_config *c = &k->config;
    double dim[MF_N_DIMS], theta, eps, window;
    int64_t dims[MF_N_DIMS];
    for (int i = 0; i < MF_N_DIMS; i++) {
        str s = col[i == MF_LEN ? MF_COL_LEN : MF_COL_DIMS + i];
        if (mf_numbers(s, &dim[i], 1) != 1 || dim[i] > 1e12 || dim[i] != floor(dim[i]))
            return fail(e, TOKA_E_INPUT, "%s: %s is \"%.*s\", expected a whole number", where, mf_dims[i].letter, STRF(s));
        dims[i] = (int64_t)dim[i];
    }
    c->arch = mf_arch_by_name(col[MF_COL_ARCH]);
    if (!c->arch) return fail(e, TOKA_E_INPUT, "%s: architecture %.*s is not supported", where, STRF(col[MF_COL_ARCH]));
    if (mf_set_dims(c, dims, where, e)) return e->code;
    if (!mf_known_rope(col[MF_COL_ROPE], &c->rope))
        return fail(e, TOKA_E_INPUT, "%s: rope is \"%.*s\", expected default, linear:F, llama3:F,LOW,HIGH,ORIGINAL or "
                    "yarn:F,ORIGINAL", where, STRF(col[MF_COL_ROPE]));
    if (mf_numbers(col[MF_COL_THETA], &theta, 1) != 1 || theta <= 1 || theta > 1e18)
        return fail(e, TOKA_E_INPUT, "%s: theta is \"%.*s\", expected a number over 1", where, STRF(col[MF_COL_THETA]));
    if (mf_numbers(col[MF_COL_EPS], &eps, 1) != 1 || eps > 1)
        return fail(e, TOKA_E_INPUT, "%s: eps is \"%.*s\", expected a number up to 1", where, STRF(col[MF_COL_EPS]));
    if (!mf_known_extras(col[MF_COL_EXTRAS], c, &window))
        return fail(e, TOKA_E_INPUT, "%s: extras are \"%.*s\", expected - or some of qkv_bias, o_bias, qk_norm, window=N",
                    where, STRF(col[MF_COL_EXTRAS]));
    if (!str_is(col[MF_COL_TIED], "tied") && !str_is(col[MF_COL_TIED], "untied"))
        return fail(e, TOKA_E_INPUT, "%s: \"%.*s\", expected tied or untied", where, STRF(col[MF_COL_TIED]));
    if (str_is(col[MF_COL_TIED], "untied")) c->features |= MF_LM_HEAD;
    c->rope.theta = theta;
    c->shape.eps = (float)eps;
    c->bos_id = -1;
    c->window = arena_alloc(a, (size_t)c->shape.L * sizeof *c->window);
    for (int i = 0; i < c->shape.L; i++) c->window[i] = (int)window;
    mf_finish_rope(c, a);
    k->name = arena_cstr(a, col[MF_COL_NAME]), k->hub_id = arena_cstr(a, col[MF_COL_HUB]);
    k->family = arena_cstr(a, col[MF_COL_FAMILY]), k->verified = arena_cstr(a, col[MF_COL_VERIFIED]);
    return 0;
}

/* Splits a line at spaces; the number of words, of which at most MF_N_COLS are stored. */
static int mf_split(str line, str col[MF_N_COLS]) {
    int n = 0;
    for (size_t i = 0; i < line.n;) {
        size_t from = i;
        while (i < line.n && !strchr(" \t\r", line.p[i] ? line.p[i] : 'x')) i++;
        if (i > from && n++ < MF_N_COLS) col[n - 1] = str_sub(line, from, i);
        if (i < line.n && i == from) i++;
    }
    return n;
}

/* The text of models.txt to a list of known models; everything lives in `a`. */
static int mf_models_parse(str text, arena *a, mf_known **list, int *n, toka_err *e) {
    size_t cap = 1;
    for (size_t i = 0; i < text.n; i++) cap += text.p[i] == '\n';
    mf_known *known = *list = arena_zalloc(a, cap * sizeof *known);
    *n = 0;
    *e = (toka_err){0};
    for (size_t from = 0, line = 1; from < text.n; line++) {
        ptrdiff_t newline = str_find(text, STR("\n"), from);
        str s = str_sub(text, from, newline < 0 ? text.n : (size_t)newline), col[MF_N_COLS];
        from += s.n + 1;
        ptrdiff_t comment = str_find(s, STR("#"), 0);
        if (comment >= 0) s.n = (size_t)comment;
        int n_cols = mf_split(s, col);
        char where[48];
        snprintf(where, sizeof where, "models.txt line %zu", line);
        if (!n_cols) continue;
        if (n_cols != MF_N_COLS) return fail(e, TOKA_E_INPUT, "%s: %d columns, expected %d", where, n_cols, MF_N_COLS);
        if (mf_known_read(col, where, a, &known[*n], e)) return e->code;
        for (int i = 0; i < *n; i++)
            if (strcasecmp(known[i].name, known[*n].name) == 0)
                return fail(e, TOKA_E_INPUT, "%s: %s is there twice", where, known[i].name);
        ++*n;
    }
    return 0;
}

/* ---- Finding: what the user called the model to a folder ---- */

/* Reads models.txt: the given file, else the one beside the program, else the one in the current folder, else no model. */
static int mf_models_open(const char *models_file, arena *a, mf_known **list, int *n, toka_err *e) {
    char path[PATH_MAX + 16];
    str text;
    *list = NULL;
    *n = 0;
    if (models_file) {
        snprintf(path, sizeof path, "%s", models_file);
    } else {
        ssize_t len = readlink("/proc/self/exe", path, PATH_MAX);
        while (len > 0 && path[len - 1] != '/') len--;
        strcpy(path + MAX(len, (ssize_t)0), "models.txt");
        if (len <= 0 || access(path, F_OK) != 0) strcpy(path, "models.txt");
        if (access(path, F_OK) != 0) return 0;
    }
    int code = os_map(path, &text, e);
    if (code) return code;
    code = mf_models_parse(text, a, list, n, e);
    os_unmap(text);
    return code;
}

/* The hub cache's folder, as huggingface_hub finds it. */
static void mf_hub_cache(buf *out) {
    static const char *const from[][2] = {{"HF_HUB_CACHE", ""}, {"HUGGINGFACE_HUB_CACHE", ""}, {"HF_HOME", "/hub"},
                                          {"XDG_CACHE_HOME", "/huggingface/hub"}, {"HOME", "/.cache/huggingface/hub"}};
    for (int i = 0; i < COUNT(from); i++) {
        const char *value = getenv(from[i][0]);
        if (!value || !*value) continue;
        buf_c(out, value), buf_c(out, from[i][1]);
        return;
    }
    buf_c(out, ".cache/huggingface/hub");
}

/* "org/name" or "name", of letters, digits and -_. with no part that begins with a dot. */
static bool mf_is_hub_id(str s) {
    int slashes = 0;
    for (size_t i = 0; i < s.n; i++) {
        bool first = i == 0 || s.p[i - 1] == '/';
        if (s.p[i] == '/') slashes++;
        else if (!isalnum((unsigned char)s.p[i]) && !strchr("-_.", s.p[i] ? s.p[i] : '/')) return false;
        if (first && (s.p[i] == '.' || s.p[i] == '/')) return false;
    }
    return s.n && s.n < 200 && slashes <= 1 && s.p[s.n - 1] != '/';
}

/* A hub id, or ID@REVISION, to the folder of its snapshot in the cache: models--org--name/snapshots/COMMIT, where
 * models--org--name/refs/REVISION holds the commit's name. *called: what the user typed, when that was not the id. */
static int mf_find_hub(const char *id, const char *called, char **folder, arena *a, toka_err *e) {
    const char *at = strchr(id, '@');
    const str repo = {id, at ? (size_t)(at - id) : strlen(id)}, rev = at ? str_c(at + 1) : STR("main");
    if (!mf_is_hub_id(repo) || !mf_is_hub_id(rev) || memchr(rev.p, '/', rev.n))
        return fail(e, TOKA_E_USE, "%s: no such folder, and not a hub id", id);
    buf path = {0}, cache = {0};
    mf_hub_cache(&cache);
    buf_printf(&path, "%s/models--", cache.p);
    for (size_t i = 0; i < repo.n; i++)
        if (repo.p[i] == '/') buf_c(&path, "--");
        else buf_char(&path, repo.p[i]);
    size_t root = path.n;
    buf_printf(&path, "/refs/%.*s", (int)rev.n, rev.p);
    str commit = rev, text = STR("");
    if (os_is_file(path.p) && os_map(path.p, &text, e) == 0) {
        commit = text;
        while (commit.n && isspace((unsigned char)commit.p[commit.n - 1])) commit.n--;
        if (!mf_is_hub_id(commit) || memchr(commit.p, '/', commit.n)) commit = rev;
    }
    path.n = root;
    buf_printf(&path, "/snapshots/%.*s", (int)commit.n, commit.p);
    os_unmap(text);
    *folder = os_is_dir(path.p) ? arena_cstr(a, buf_view(&path)) : NULL;
    if (!*folder)
        fail(e, TOKA_E_INPUT, "%s%s%s is not in the hub cache %s; get it with: hf download %.*s%s%s", called ? called : "",
             called ? ": " : "", id, cache.p, (int)repo.n, repo.p, at ? " --revision " : "", at ? at + 1 : "");
    buf_free(&path), buf_free(&cache);
    return *folder ? 0 : e->code;
}

/* Sets m->folder, m->name, m->hub_id. What exists as a path goes first; else what has a slash is a hub id, and what has
 * none a name of models.txt. */
static int mf_find(mf_model *m, const char *model, const char *models_file, toka_err *e) {
    struct stat st;
    bool there = stat(model, &st) == 0;
    int err = errno;
    str s = str_c(model);
    if (there && S_ISDIR(st.st_mode)) {
        char *real = realpath(model, NULL); /* "." and "models/x/" have a last part too */
        const char *last = real ? strrchr(real, '/') : NULL;
        m->name = arena_cstr(&m->a, last && last[1] ? str_c(last + 1) : s);
        m->folder = arena_cstr(&m->a, s);
        free(real);
        return 0;
    }
    if (there)
        return fail(e, TOKA_E_INPUT, "%s: not a folder; a model is a folder with config.json and model.safetensors", model);
    if (err != ENOENT && err != ENOTDIR) return fail(e, TOKA_E_INPUT, "%s: %s", model, strerror(err));
    if (strchr(model, '/')) { /* no name of models.txt has a slash */
        m->name = m->hub_id = arena_cstr(&m->a, s);
        return mf_find_hub(model, NULL, &m->folder, &m->a, e);
    }
    mf_known *known;
    int n;
    if (mf_models_open(models_file, &m->a, &known, &n, e)) return e->code;
    for (int i = 0; i < n; i++)
        if (strcasecmp(known[i].name, model) == 0) {
            m->name = known[i].name, m->hub_id = known[i].hub_id;
            return mf_find_hub(m->hub_id, m->name, &m->folder, &m->a, e);
        }
    return fail(e, TOKA_E_USE, "%s: no such folder, and no such name in models.txt (see: toka models)", model);
}

/* ---- Opening ---- */

static const mf_embedded *mf_embedded_find(const mf_embedded *f, const char *name) { /* NULL: not there */
    while (f->name && strcmp(f->name, name) != 0) f++;
    return f->name ? f : NULL;
}

/* A file of the model, mapped until mf_close. `where` gets its path, for messages. Not there and not required: {"",0}; an
 * empty one is an error. */
static int mf_file(mf_model *m, const char *name, bool required, char where[256], str *out, toka_err *e) {
    *out = STR("");
    if (m->embedded) {
        snprintf(where, 256, "embedded %s", name);
        const mf_embedded *f = mf_embedded_find(m->embedded, name);
        if (f) *out = (str){f->begin, (size_t)(f->end - f->begin)};
        if (f && !out->n) return fail(e, TOKA_E_INPUT, "%s: the file is empty", where);
        return f || !required ? 0 : fail(e, TOKA_E_INPUT, "%s: no such file", where);
    }
    buf path = {0};
    struct stat st;
    buf_printf(&path, "%s/%s", m->folder, name);
    snprintf(where, 256, "%s", path.n < 200 ? path.p : name);
    int code = 0;
    bool wanted = required || lstat(path.p, &st) == 0 || errno != ENOENT;
    if (wanted) code = os_map(path.p, out, e);
    if (wanted && !code && !out->n) code = fail(e, TOKA_E_INPUT, "%s: the file is empty", where);
    if (!code && out->n) {
        m->maps = mem_realloc(m->maps, (size_t)(m->n_maps + 1) * sizeof *m->maps);
        m->maps[m->n_maps++] = *out;
    }
    buf_free(&path);
    return code;
}

static int mf_open_configs(mf_model *m, toka_err *e) {
    char where[256];
    str text;
    if (mf_file(m, "config.json", true, where, &text, e)) return e->code;
    if (mf_config_parse(text, where, &m->a, &m->config, e)) return e->code;
    if (mf_file(m, "generation_config.json", false, where, &text, e)) return e->code;
    if (text.n && mf_generation_parse(text, where, &m->a, &m->config, &m->defaults, e)) return e->code;
    if (mf_file(m, "tokenizer.json", false, where, &m->tokenizer_json, e)) return e->code;
    if (mf_file(m, "tokenizer_config.json", false, where, &m->tokenizer_config, e)) return e->code;
    if (m->tokenizer_config.n && mf_tokenizer_config_parse(m->tokenizer_config, where, &m->a, m, e)) return e->code;
    if (mf_file(m, "chat_template.jinja", false, where, &text, e)) return e->code;
    if (text.n) m->chat_template = text, m->tool_template = STR("");
    const mf_config *c = &m->config;
    snprintf(m->architecture, sizeof m->architecture, "%s", c->arch->name);
    m->shape = c->shape;
    m->bos_id = c->bos_id, m->eos_ids = c->eos_ids, m->n_eos_ids = c->n_eos_ids;
    return 0;
}

/* Maps one weight file and adds its tensors to the set; headers live in tmp. */
static int mf_open_shard(mf_model *m, const char *name, st_set *set, arena *tmp, toka_err *e) {
    char where[256];
    str text;
    st_tensor *t;
    int n;
    if (mf_file(m, name, true, where, &text, e)) return e->code;
    if (st_parse(text, arena_cstr(tmp, str_c(where)), tmp, &t, &n, e)) return e->code;
    for (int i = 0; i < n; i++)
        if (st_set_add(set, &t[i], e)) return e->code;
    return 0;
}

static bool mf_has(const mf_model *m, const char *name) { /* a file, or something in its place that will be an error */
    struct stat st;
    if (m->embedded) return mf_embedded_find(m->embedded, name) != NULL;
    buf path = {0};
    buf_printf(&path, "%s/%s", m->folder, name);
    bool has = lstat(path.p, &st) == 0;
    buf_free(&path);
    return has;
}

/* All tensors of model.safetensors, or of the files that the index names. */
static int mf_open_shards(mf_model *m, st_set *set, arena *tmp, toka_err *e) {
    static const char one[] = "model.safetensors", index[] = "model.safetensors.index.json";
    char where[256];
    str text, *files;
    int n;
    if (mf_has(m, one)) return mf_open_shard(m, one, set, tmp, e);
    if (!mf_has(m, index))
        return fail(e, TOKA_E_INPUT, "%s: there is no %s and no %s%s%s%s", m->folder ? m->folder : "embedded", one, index,
                    mf_has(m, "pytorch_model.bin") ? "; pytorch_model.bin is not read" : "",
                    m->hub_id ? "; get them with: hf download " : "", m->hub_id ? m->hub_id : "");
    if (mf_file(m, index, true, where, &text, e)) return e->code;
    if (st_index_parse(text, where, tmp, &files, &n, e)) return e->code;
    for (int i = 0; i < n; i++)
        if (mf_open_shard(m, arena_cstr(tmp, files[i]), set, tmp, e)) return e->code;
    return 0;
}

static int mf_open_weights(mf_model *m, toka_err *e) {
    arena tmp = {0};
    st_set set = {0};
    mf_binder b = {.c = &m->config, .set = &set, .where = m->folder ? m->folder : "the embedded model", .w = &m->weights};
    int code = mf_open_shards(m, &set, &tmp, e);
    if (!code) code = mf_bind(&b, &m->a, e);
    m->n_parameters = b.n_parameters, m->weight_bytes = b.weight_bytes;
    st_set_free(&set);
    arena_free(&tmp);
    return code;
}

static void mf_close(mf_model *m) {
    if (!m) return;
    for (int i = 0; i < m->n_maps; i++) os_unmap(m->maps[i]);
    free(m->maps);
    arena_free(&m->a);
    free(m);
}

/* As mf_open, but leaves the weights closed: enough for tokenizer and template, and they need not be there. */
static int mf_open_text(mf_model **out, const char *model, const char *models_file, const mf_embedded *embedded, toka_err *e) {
    mf_model *m = *out = mem_zalloc(sizeof *m);
    int code = 0;
    m->tokenizer_json = m->tokenizer_config = m->chat_template = m->tool_template = STR("");
    m->config.bos_id = m->bos_id = -1;
    m->defaults = mf_no_defaults;
    if (model) code = mf_find(m, model, models_file, e);
    else if (embedded && embedded->name) m->embedded = embedded, m->name = arena_cstr(&m->a, STR("embedded"));
    else code = fail(e, TOKA_E_USE, "no model given, and none is embedded in this program");
    if (!code) code = mf_open_configs(m, e);
    if (!code) return 0;
    mf_close(m);
    *out = NULL;
    return code;
}

/* Opens what `model` names; NULL: the embedded model. models_file: models.txt, NULL: beside the program or here. *out is
 * the caller's until mf_close. */
static int mf_open(mf_model **out, const char *model, const char *models_file, const mf_embedded *embedded, toka_err *e) {
    int code = mf_open_text(out, model, models_file, embedded, e);
    if (code || !(code = mf_open_weights(*out, e))) return code;
    mf_close(*out);
    *out = NULL;
    return code;
}

/* ===========================================================================
 * MARK: 11. KV pages and prefix tree [pure]
 * Who holds which page of the KV cache, and which pages hold the same tokens.
 *
 * A page has room for the K and V of B tokens. A sequence (slot q) holds a row of pages, page i for positions i*B ..
 * i*B+B-1. Pages whose B tokens are all known hang in a tree: a node is a page, its key is (parent page, its B tokens),
 * so the path from the root spells a prefix and two sequences with the same prefix hold the same pages. The first
 * n_tree pages of a row are in the tree, the rest are the sequence's own.
 *
 *      root --- [The cat sat on] --- [the mat and the] --- [dog barked at it]      q1: 3 tree pages, then own ones
 *                              \                     \---- [bird sang a song]      q2
 *                               \--- [a hot tin roof ]                             q3
 *
 * One page is always in exactly one of three places:
 *
 *      free    --kv_open, kv_grow-->    held (ref > 0)    --kv_close: not in the tree, or never computed-->    free
 *      cached  --kv_open: matched-->    held              --kv_close: in the tree and ready-->                 cached
 *      cached  --kv_take: the free list is empty, the longest unused leaf goes--> held by another
 *
 * In the tree: the full pages of a prompt at kv_open, before anything is computed (n samples share at once); a page
 * filled by generation at kv_fill. `ready` says that a step which computes the page's K and V has been planned. Steps
 * run in the order in which they are planned, so whoever plans a later row may read it. Nobody needs to remember who
 * computes a page: a sequence in prefill skips pages that became ready (kv_skip) and computes the first that is not, so
 * any other holder may vanish.
 *
 * Rows are also kept in an order in which the holders of every page lie side by side, with the number of pages that
 * each row has in common with the one before it (lcp): chapter 14 reads the groups that share a prefix from that.
 *
 * What always holds (kv_check): ref = number of rows with the page; a held or ready page's parent is held or ready too;
 * a page is in the LRU list if it is in the tree, unheld and without children; an unheld page of the tree is ready.
 * Nothing is allocated after kv_init. Cost: O(pages of the row) for kv_open and kv_close, O(1) for the rest.
 * =========================================================================== */

#define KV_OFF (-1) /* as parent: not in the tree */

typedef struct kv_page {
    uint64_t hash;  /* of all tokens from the root to the end of this page; while in the tree */
    int64_t tick;   /* when its last holder let go */
    int ref;        /* rows that have it */
    int parent;     /* page, kv.root, or KV_OFF */
    int n_children; /* in the tree, held or not */
    int chain;      /* next page of the same hash bucket, -1 ends */
    int older, newer; /* LRU list, while an unheld leaf */
    int last;       /* last row of the order that has it, while held and in the tree */
    bool ready;
} kv_page;

typedef struct kv_seq {
    int prev, next; /* the order */
    int lcp;        /* leading pages in common with prev */
    int n_pages, n_tree;
    bool stray;     /* no page of this row enters any more: it is alone, or an equal page stood in the tree, not ready */
} kv_seq;

typedef struct kv_cache {
    int B, n_pages, n_seqs;
    int cap, stride;   /* most pages of a row; ints from one row to the next */
    int root;          /* = n_pages: pages[root] is the root of the tree and both ends of the LRU list */
    kv_page *pages;    /* [n_pages + 1] */
    int32_t *tokens;   /* [n_pages][B] of the pages in the tree */
    int *bucket;       /* [n_bucket] hash table: first page or -1 */
    uint64_t n_bucket; /* power of two */
    int *free_list;    /* stack */
    int n_free, n_cached;
    kv_seq *seqs;      /* [n_seqs + 1]; the last one is both ends of the order */
    int *table;        /* [n_seqs][stride] */
    int64_t tick;
    int64_t n_evicted; /* since kv_init */
} kv_cache;

static void kv_free(kv_cache *k) {
    free(k->pages), free(k->tokens), free(k->bucket), free(k->free_list), free(k->seqs), free(k->table);
    *k = (kv_cache){0};
}

/* False: so much memory there is not; nothing is held then. */
static bool kv_init(kv_cache *k, int B, int n_pages, int n_seqs, int max_len) {
    *k = (kv_cache){.B = B, .n_pages = n_pages, .n_seqs = n_seqs, .cap = (max_len + B - 1) / B, .root = n_pages};
    for (k->n_bucket = 16; k->n_bucket < (uint64_t)n_pages * 2; k->n_bucket *= 2) {}
    k->stride = (k->cap + 15) / 16 * 16 | 16; /* an odd number of cache lines: columns spread over all cache sets */
    k->pages = mem_try((size_t)n_pages + 1, sizeof *k->pages);
    k->tokens = mem_try((size_t)n_pages * (size_t)B, sizeof *k->tokens);
    k->bucket = mem_try(k->n_bucket, sizeof *k->bucket);
    k->free_list = mem_try((size_t)n_pages, sizeof *k->free_list);
    k->seqs = mem_try((size_t)n_seqs + 1, sizeof *k->seqs);
    k->table = mem_try((size_t)n_seqs * (size_t)k->stride, sizeof *k->table);
    if (!k->pages || !k->tokens || !k->bucket || !k->free_list || !k->seqs || !k->table) return kv_free(k), false;
    for (uint64_t i = 0; i < k->n_bucket; i++) k->bucket[i] = -1;
    for (int p = n_pages - 1; p >= 0; p--) k->pages[p].parent = KV_OFF, k->free_list[k->n_free++] = p;
    k->pages[k->root] = (kv_page){.hash = 1, .parent = KV_OFF, .older = k->root, .newer = k->root, .ready = true};
    k->seqs[n_seqs].prev = k->seqs[n_seqs].next = n_seqs;
    return true;
}

static int *kv_row(const kv_cache *k, int q) { return k->table + (size_t)q * (size_t)k->stride; }

/* Pages that kv_take can still give. Every cached page can be had: what hangs below an unheld page is unheld. */
static int kv_room(const kv_cache *k) { return k->n_free + k->n_cached; }

static int kv_pages_for(const kv_cache *k, int n_tokens) { return (n_tokens + k->B - 1) / k->B; }

/* ---- LRU list of unheld leaves: pages[root].newer is the oldest ---- */

static void kv_lru_put(kv_cache *k, int p, int after) {
    kv_page *g = k->pages;
    g[p].older = after, g[p].newer = g[after].newer;
    g[g[p].newer].older = p, g[after].newer = p;
}

static void kv_lru_cut(kv_cache *k, int p) {
    kv_page *g = k->pages;
    g[g[p].older].newer = g[p].newer, g[g[p].newer].older = g[p].older;
}

/* ---- Tree ---- */

static uint64_t kv_hash(const kv_cache *k, uint64_t parent_hash, const int32_t *tokens) {
    uint64_t h = (parent_hash ^ hash_bytes(tokens, (size_t)k->B * sizeof *tokens)) * 0x9E3779B97F4A7C15u;
    return h ^ h >> 32;
}

/* The page below `parent` with these B tokens, or -1. */
static int kv_child(const kv_cache *k, int parent, uint64_t hash, const int32_t *tokens) {
    int p = k->bucket[hash & (k->n_bucket - 1)];
    for (; p >= 0; p = k->pages[p].chain)
        if (k->pages[p].hash == hash && k->pages[p].parent == parent &&
            !memcmp(k->tokens + (size_t)p * (size_t)k->B, tokens, (size_t)k->B * sizeof *tokens))
            return p;
    return -1;
}

static void kv_enter(kv_cache *k, int p, int parent, uint64_t hash, const int32_t *tokens) {
    int *head = &k->bucket[hash & (k->n_bucket - 1)];
    k->pages[p].parent = parent, k->pages[p].hash = hash, k->pages[p].chain = *head, k->pages[p].last = -1;
    *head = p;
    k->pages[parent].n_children++;
    memcpy(k->tokens + (size_t)p * (size_t)k->B, tokens, (size_t)k->B * sizeof *tokens);
}

/* Takes a page without children out of the tree. Its parent may become an unheld leaf: it goes next, unless somebody
 * let go of it after p was let go. */
static void kv_leave(kv_cache *k, int p) {
    kv_page *g = k->pages;
    int parent = g[p].parent, *at = &k->bucket[g[p].hash & (k->n_bucket - 1)];
    while (*at != p) at = &g[*at].chain;
    *at = g[p].chain;
    g[p].parent = KV_OFF, g[p].ready = false;
    if (--g[parent].n_children || parent == k->root || g[parent].ref) return;
    kv_lru_put(k, parent, g[parent].tick > g[p].tick ? g[k->root].older : k->root);
}

/* ---- One page: held, let go, taken ---- */

static void kv_hold(kv_cache *k, int p) {
    if (k->pages[p].ref++) return;
    k->n_cached--;
    if (!k->pages[p].n_children) kv_lru_cut(k, p);
}

static void kv_drop(kv_cache *k, int p) {
    kv_page *g = &k->pages[p];
    assert(g->ref > 0);
    if (--g->ref) return;
    g->tick = k->tick;
    if (g->parent != KV_OFF && g->ready) { /* stays as cache */
        k->n_cached++;
        if (!g->n_children) kv_lru_put(k, p, k->pages[k->root].older);
        return;
    }
    if (g->parent != KV_OFF) kv_leave(k, p); /* nobody will compute it now */
    k->free_list[k->n_free++] = p;
}

/* A page of nobody, now held once and not in the tree. The caller made sure of kv_room. */
static int kv_take(kv_cache *k) {
    int p;
    if (k->n_free) p = k->free_list[--k->n_free];
    else {
        p = k->pages[k->root].newer;
        assert(p != k->root);
        kv_lru_cut(k, p);
        kv_leave(k, p);
        k->n_cached--, k->n_evicted++;
    }
    k->pages[p].ref = 1, k->pages[p].ready = false;
    return p;
}

/* ---- The order of rows ----
 * A new row goes behind the last row that has its deepest shared page P. That is the end of P's stretch and of no
 * stretch that P's does not lie in, so no stretch is torn, and the row behind keeps its lcp: it does not have P. */

static void kv_order_join(kv_cache *k, int q) {
    kv_seq *s = k->seqs;
    kv_page *g = k->pages;
    int *row = kv_row(k, q), shared = s[q].n_tree;
    while (shared && g[row[shared - 1]].ref == 1) g[row[--shared]].last = q;
    int a = shared ? g[row[shared - 1]].last : s[k->n_seqs].prev;
    for (int i = shared - 1; i >= 0 && g[row[i]].last == a; i--) g[row[i]].last = q;
    s[q].lcp = shared, s[q].prev = a, s[q].next = s[a].next;
    s[s[a].next].prev = q, s[a].next = q;
}

static void kv_order_leave(kv_cache *k, int q) {
    kv_seq *s = k->seqs;
    int *row = kv_row(k, q), a = s[q].prev, b = s[q].next;
    for (int i = s[q].n_tree - 1; i >= 0 && k->pages[row[i]].last == q; i--) k->pages[row[i]].last = i < s[q].lcp ? a : -1;
    s[b].lcp = MIN(s[b].lcp, s[q].lcp);
    s[a].next = b, s[b].prev = a;
}

/* ---- Rows ---- */

/* Leading pages of the tree that hold tokens[0..]; the last token never counts, its row must be computed for its
 * logits. Writes them to `row`, that of a sequence which is not open, if not NULL; holds nothing. */
static int kv_match(const kv_cache *k, int *row, const int32_t *tokens, int n) {
    int m = 0, at = k->root;
    uint64_t h = k->pages[at].hash;
    for (; (m + 1) * k->B < n; m++) {
        h = kv_hash(k, h, tokens + (size_t)m * (size_t)k->B);
        at = kv_child(k, at, h, tokens + (size_t)m * (size_t)k->B);
        if (at < 0) break;
        if (row) row[m] = at;
    }
    return m;
}

/* Opens row q for n tokens of which kv_match found m pages. Takes the rest, ceil(n/B) - m pages, and enters all full pages
 * before the last token; or, alone (with m = 0), none, now or later. Needs kv_room >= the pages to take + the matched pages
 * that nobody holds. */
static void kv_open(kv_cache *k, int q, const int32_t *tokens, int n, int m, bool alone) {
    int *row = kv_row(k, q), n_pages = kv_pages_for(k, n), n_tree = alone ? 0 : (n - 1) / k->B;
    for (int i = 0; i < m; i++) kv_hold(k, row[i]);
    for (int i = m; i < n_pages; i++) row[i] = kv_take(k);
    for (int i = m; i < n_tree; i++) {
        const int32_t *t = tokens + (size_t)i * (size_t)k->B;
        int parent = i ? row[i - 1] : k->root;
        kv_enter(k, row[i], parent, kv_hash(k, k->pages[parent].hash, t), t);
    }
    k->seqs[q].n_pages = n_pages, k->seqs[q].n_tree = n_tree, k->seqs[q].stray = alone;
    kv_order_join(k, q);
}

/* One more page at the end of row q; returns it. Needs kv_room. */
static int kv_grow(kv_cache *k, int q) {
    assert(k->seqs[q].n_pages < k->cap);
    return kv_row(k, q)[k->seqs[q].n_pages++] = kv_take(k);
}

static void kv_close(kv_cache *k, int q) {
    int *row = kv_row(k, q);
    kv_order_leave(k, q);
    k->tick++;
    for (int i = k->seqs[q].n_pages - 1; i >= 0; i--) kv_drop(k, row[i]);
    k->seqs[q].n_pages = k->seqs[q].n_tree = 0;
}

/* Positions from `from` on that q need not compute: the pages that became ready meanwhile. */
static int kv_skip(const kv_cache *k, int q, int from) {
    const int *row = kv_row(k, q);
    int i = from / k->B;
    while (i < k->seqs[q].n_tree && k->pages[row[i]].ready) from = ++i * k->B;
    return from;
}

/* A step that computes positions from .. to-1 of q has been planned. */
static void kv_computed(kv_cache *k, int q, int from, int to) {
    const int *row = kv_row(k, q);
    for (int i = from / k->B; i < MIN(to / k->B, k->seqs[q].n_tree); i++) k->pages[row[i]].ready = true;
}

enum kv_filled { KV_ENTERED, KV_SWAPPED, KV_STRAY };

/* The B tokens of row q's first page outside the tree are known and computed: it enters. If an equal page is there and
 * ready, q holds that one from now on and its own becomes free (steps planned so far are done with it before any that a
 * new owner plans). */
static enum kv_filled kv_fill(kv_cache *k, int q, const int32_t *tokens) {
    kv_seq *s = &k->seqs[q];
    int *row = kv_row(k, q), i = s->n_tree, parent = i ? row[i - 1] : k->root;
    const int32_t *t = tokens + (size_t)i * (size_t)k->B;
    uint64_t h = kv_hash(k, k->pages[parent].hash, t);
    int twin = kv_child(k, parent, h, t);
    assert(i < s->n_pages && !s->stray);
    if (twin < 0) {
        kv_enter(k, row[i], parent, h, t);
        k->pages[row[i]].ready = true, k->pages[row[i]].last = q;
        s->n_tree++;
        return KV_ENTERED;
    }
    if (!k->pages[twin].ready) {
        s->stray = true;
        return KV_STRAY;
    }
    kv_order_leave(k, q);
    kv_hold(k, twin);
    kv_drop(k, row[i]);
    row[i] = twin;
    s->n_tree++;
    kv_order_join(k, q);
    return KV_SWAPPED;
}

/* ---- The whole state, checked: NULL, or what is wrong. For tests; costs O(everything) ---- */

#define KV_MUST(cond) \
    if (!(cond)) return #cond

static const char *kv_check_pages(const kv_cache *k, const int *ref, const int *children, const char *place) {
    int n_cached = 0, n_leaves = 0, n_lru = 0;
    for (int p = 0; p < k->n_pages; p++) {
        const kv_page *g = &k->pages[p];
        KV_MUST(g->ref == ref[p]);
        KV_MUST(g->n_children == children[p]);
        bool in_tree = g->parent != KV_OFF;
        KV_MUST((place[p] == 'f') == (!g->ref && !in_tree)); /* free: nobody's, and not known */
        KV_MUST(!in_tree || g->ref || g->ready);
        n_cached += in_tree && !g->ref;
        n_leaves += in_tree && !g->ref && !g->n_children;
        if (!in_tree) continue;
        const kv_page *up = &k->pages[g->parent];
        const int32_t *t = k->tokens + (size_t)p * (size_t)k->B;
        KV_MUST(g->parent == k->root || up->parent != KV_OFF);
        KV_MUST(g->parent == k->root || !g->ref || up->ref >= g->ref);
        KV_MUST(!g->ready || up->ready);
        KV_MUST(g->hash == kv_hash(k, up->hash, t));
        KV_MUST(kv_child(k, g->parent, g->hash, t) == p); /* found, and no twin */
    }
    KV_MUST(k->pages[k->root].n_children == children[k->root]);
    for (int p = k->pages[k->root].newer; p != k->root; p = k->pages[p].newer, n_lru++) {
        const kv_page *g = &k->pages[p];
        KV_MUST(g->parent != KV_OFF && !g->ref && !g->n_children);
        KV_MUST(k->pages[g->newer].older == p && n_lru < n_leaves);
    }
    KV_MUST(n_lru == n_leaves && n_cached == k->n_cached);
    return NULL;
}

static const char *kv_check_order(const kv_cache *k, const bool *open) {
    int n = 0, n_open = 0, end = k->n_seqs;
    for (int q = 0; q < k->n_seqs; q++) n_open += open[q];
    for (int q = k->seqs[end].next; q != end; q = k->seqs[q].next, n++) {
        const kv_seq *s = &k->seqs[q];
        KV_MUST(n < n_open && open[q] && k->seqs[s->next].prev == q);
        const int *row = kv_row(k, q);
        int m = 0;
        if (s->prev != end)
            while (m < s->n_pages && m < k->seqs[s->prev].n_pages && row[m] == kv_row(k, s->prev)[m]) m++;
        KV_MUST(s->lcp == m && m <= s->n_tree);
        for (int i = 0; i < s->n_tree; i++) { /* `last` is right, and behind it nobody has the page */
            int last = k->pages[row[i]].last, r = q, holders = 1;
            if (i >= s->lcp) { /* q is the first that has it */
                for (int next = s->next; next != end && k->seqs[next].lcp > i; next = k->seqs[r].next) r = next, holders++;
                KV_MUST(r == last && holders == k->pages[row[i]].ref);
            }
        }
    }
    KV_MUST(n == n_open);
    return NULL;
}

/* open[q]: the row is in use. */
UNUSED static const char *kv_check(const kv_cache *k, const bool *open) {
    size_t n = (size_t)k->n_pages + 1;
    int *ref = mem_zalloc(n * sizeof *ref), *children = mem_zalloc(n * sizeof *children);
    char *place = mem_zalloc(n);
    const char *bad = NULL;
    for (int q = 0; q < k->n_seqs; q++)
        for (int i = 0; i < k->seqs[q].n_pages; i++) {
            int p = kv_row(k, q)[i], parent = i ? kv_row(k, q)[i - 1] : k->root;
            ref[p]++;
            if (!open[q]) bad = "a closed row has pages";
            if ((k->pages[p].parent != KV_OFF) != (i < k->seqs[q].n_tree)) bad = "n_tree is wrong";
            if (i < k->seqs[q].n_tree && k->pages[p].parent != parent) bad = "a row leaves its path";
            if (i >= k->seqs[q].n_tree && k->pages[p].ref != 1) bad = "an own page has two owners";
        }
    for (int p = 0; p < k->n_pages; p++)
        if (k->pages[p].parent != KV_OFF) children[k->pages[p].parent]++;
    for (int i = 0; i < k->n_free; i++) {
        if (place[k->free_list[i]]) bad = "a page is free twice";
        place[k->free_list[i]] = 'f';
    }
    if (!bad) bad = kv_check_pages(k, ref, children, place);
    if (!bad) bad = kv_check_order(k, open);
    free(ref), free(children), free(place);
    return bad;
}

/* ===========================================================================
 * MARK: 12. Length predictor [pure]
 * How long will this output get? In: the lengths of outputs so far, the running ones included. Out: the distribution of the
 * length of an output that has c tokens already.
 *
 * Lengths fall into buckets that grow by a quarter each. For every bucket a table counts the sequences that reached it
 * (at_risk) and those that ended in it; ended / at_risk is the chance to end there (a discrete Kaplan-Meier hazard), and
 * survival is the product of 1 - hazard. Running sequences count in every bucket they reached, so the short ones, which end
 * first, do not make the rest look short; those cut off by max_tokens or cancelled count as reached, not as ended.
 *
 * A class is a set of requests whose lengths are alike: the samples of one prompt, or requests given the same key. Its
 * hazards are drawn toward those of all classes together as if PRED_OF_ALL more sequences had been seen, and those
 * toward a fixed prior as if PRED_OF_PRIOR had. The prior has survival (1 + c/192)^-2: mean 192 without limit, 162 of
 * 1,024, 15 of 16, and the longer an output is the longer it may still get, so that a cold start runs most of the batch
 * but does not trust in short answers.
 *
 * One number for a sequence would not do. If each were given the mean, none would end before the mean: the sum of many
 * over time, which is what chapter 13 wants, comes out far too high for the next steps and too low later. So each
 * sequence draws its length from the distribution (pred_length of an evenly spread number), and the sum over many is
 * right at every step.
 *
 * What always holds: survival falls from 1 and stays above 0. Arithmetic in double with + - * / only, so equal inputs
 * give equal answers everywhere.
 * =========================================================================== */

enum { PRED_N = 64, PRED_WAYS = 4 };
#define PRED_OF_ALL 8.0
#define PRED_OF_PRIOR 8.0

typedef struct pred_table {
    float at_risk[PRED_N], ended[PRED_N];
    float survival[PRED_N + 1]; /* at the lower edge of each bucket, made from the counts by pred_refresh */
    int64_t n_events, n_fresh;  /* events counted; n_events when survival was made */
} pred_table;

typedef struct pred_class { /* key 0: an empty place */
    uint64_t key;
    int64_t used;  /* tick of the last use */
    uint32_t turn; /* which class has this place: a handle of an earlier one is stale */
    pred_table t;
} pred_class;

typedef struct pred_of { /* handle of a class: place and turn; place -1: only the table of all */
    int place;
    uint32_t turn;
} pred_of;

typedef struct pred {
    int edge[PRED_N + 1]; /* bucket i holds lengths edge[i]+1 .. edge[i+1] */
    float prior[PRED_N];  /* hazard of each bucket */
    pred_table all;
    int n_places;         /* a multiple of PRED_WAYS */
    pred_class *classes;  /* [n_places] sets of PRED_WAYS; in its set the least recently used makes room */
    double memory;        /* starts after which the old ones weigh half */
    int64_t tick;
} pred;

static void pred_refresh(const pred *p, pred_table *t, const pred_table *all) {
    double s = 1;
    for (int i = 0; i < PRED_N; i++) {
        double prior = p->prior[i], weight = PRED_OF_PRIOR;
        if (all) {
            prior = ((double)all->ended[i] + PRED_OF_PRIOR * prior) / ((double)all->at_risk[i] + PRED_OF_PRIOR);
            weight = PRED_OF_ALL;
        }
        double h = ((double)t->ended[i] + weight * prior) / ((double)t->at_risk[i] + weight);
        double after = s * (1 - MAX(0.0, MIN(h, 0.98)));
        t->survival[i] = (float)s;
        s = MAX(after, 1e-30);
    }
    t->survival[PRED_N] = (float)s;
    t->n_fresh = t->n_events;
}

/* n_classes: about as many as there are classes in use at a time. n_running: sequences at a time, sets how far back it
 * looks. */
static void pred_init(pred *p, int n_classes, int n_running) {
    *p = (pred){.n_places = (n_classes + PRED_WAYS - 1) / PRED_WAYS * PRED_WAYS, .memory = MAX(4096.0, 8.0 * n_running)};
    for (int i = 0; i < PRED_N; i++) p->edge[i + 1] = p->edge[i] + MAX(1, p->edge[i] / 4);
    for (int i = 0; i < PRED_N; i++) {
        double a = 1 + p->edge[i] / 192.0, b = 1 + p->edge[i + 1] / 192.0;
        p->prior[i] = (float)(1 - a * a / (b * b));
    }
    p->classes = mem_zalloc((size_t)p->n_places * sizeof *p->classes);
    pred_refresh(p, &p->all, NULL);
}

static void pred_free(pred *p) { free(p->classes); }

static pred_table *pred_table_of(pred *p, pred_of c) {
    return c.place >= 0 && p->classes[c.place].turn == c.turn ? &p->classes[c.place].t : NULL;
}

/* The class of a key, made if it is new; key 0 has none. */
static pred_of pred_find(pred *p, uint64_t key) {
    if (!key) return (pred_of){-1, 0};
    uint64_t set = hash_bytes(&key, sizeof key) % (uint64_t)(p->n_places / PRED_WAYS);
    int first = (int)set * PRED_WAYS, at = first;
    for (int i = first; i < first + PRED_WAYS; i++) {
        if (p->classes[i].key == key) {
            p->classes[i].used = ++p->tick;
            return (pred_of){i, p->classes[i].turn};
        }
        if (p->classes[i].used < p->classes[at].used) at = i;
    }
    p->classes[at] = (pred_class){.key = key, .used = ++p->tick, .turn = p->classes[at].turn + 1};
    pred_refresh(p, &p->classes[at].t, &p->all);
    return (pred_of){at, p->classes[at].turn};
}

static int pred_bucket(const pred *p, int length) { /* edge[i] <= length < edge[i+1] */
    int lo = 0, hi = PRED_N;
    while (hi - lo > 1) {
        int mid = (lo + hi) / 2;
        if (p->edge[mid] <= length) lo = mid;
        else hi = mid;
    }
    return lo;
}

/* ---- What happened ---- */

static void pred_halve(pred_table *t) {
    for (int i = 0; i < PRED_N; i++) t->at_risk[i] /= 2, t->ended[i] /= 2;
}

/* A sequence has edge[bucket] tokens and goes on; call it for bucket 0 when it starts. */
static void pred_reach(pred *p, pred_of c, int bucket) {
    pred_table *t = pred_table_of(p, c);
    p->all.at_risk[bucket]++, p->all.n_events++;
    if (t) t->at_risk[bucket]++, t->n_events++;
    if (bucket) return;
    if (p->all.at_risk[0] > p->memory) pred_halve(&p->all);
    if (t && t->at_risk[0] > p->memory) pred_halve(t);
}

/* A sequence that reached `bucket` is gone with `length` tokens: ended by itself, or cut off (max_tokens, cancelled). */
static void pred_end(pred *p, pred_of c, int bucket, int length, bool cut) {
    pred_table *t = pred_table_of(p, c);
    float width = (float)(p->edge[bucket + 1] - p->edge[bucket]);
    float unseen = cut ? 1 - (float)(length - p->edge[bucket]) / width : 0; /* part of the bucket it was not watched in */
    p->all.ended[bucket] += !cut, p->all.at_risk[bucket] -= unseen, p->all.n_events++;
    if (t) t->ended[bucket] += !cut, t->at_risk[bucket] -= unseen, t->n_events++;
}

/* ---- The question ---- */

/* Survival is remade when the counts have changed by a part that matters. */
static bool pred_is_old(const pred_table *t) { return (t->n_events - t->n_fresh) > t->n_fresh / 16 + 16; }

/* Brings the survival of class c up to date and returns its table. */
static const pred_table *pred_fresh(pred *p, pred_of c) {
    pred_table *t = pred_table_of(p, c);
    if (pred_is_old(&p->all)) pred_refresh(p, &p->all, NULL);
    if (t && pred_is_old(t)) pred_refresh(p, t, &p->all);
    return t ? t : &p->all;
}

/* Share of the sequences of class c that get longer than `length`. */
static double pred_survival(pred *p, pred_of c, int length) {
    const pred_table *t = pred_fresh(p, c);
    int i = pred_bucket(p, length);
    double part = (double)(length - p->edge[i]) / (p->edge[i + 1] - p->edge[i]);
    return (double)t->survival[i] + (double)(t->survival[i + 1] - t->survival[i]) * part;
}

/* The length that a share `luck` (0 to 1) of class c gets past: the inverse of pred_survival, at least 1. */
static int pred_length(pred *p, pred_of c, double luck) {
    const pred_table *t = pred_fresh(p, c);
    int lo = 0, hi = PRED_N;
    while (hi - lo > 1) {
        int mid = (lo + hi) / 2;
        if ((double)t->survival[mid] > luck) lo = mid;
        else hi = mid;
    }
    double a = (double)t->survival[lo], b = (double)t->survival[lo + 1];
    double part = a > b ? MIN(MAX((a - luck) / (a - b), 0.0), 1.0) : 1.0;
    return p->edge[lo] + (int)MAX(1.0, part * (p->edge[lo + 1] - p->edge[lo]) + 0.5);
}

/* ===========================================================================
 * MARK: 13. Scheduler [pure]
 * Which tokens of which sequences go into the next step. In: requests (a prompt, n samples of it, limits), one
 * sched_plan per step, one sched_commit per token that came out. Out: for every running sequence the rows of this step.
 *
 * A request waits in a queue until all its n samples have started; a sample that started is a sequence, in a slot q
 * which it keeps to its end.
 *
 *     sched_submit --> [queued] --sched_admit--> [prefill] --sched_feed_prefill--> [decode] --sched_commit--> done
 *                                    ^               |          last chunk            |    ended, or at its limit
 *                                    +---[parked]<---+---------sched_preempt----------+
 *                                        keeps its tokens, loses its pages
 *     sched_cancel: from any state to done
 *
 * Queue order: a request that came in step a with priority p counts as if it had come in step a - p * SCHED_PRIORITY;
 * equal ones are first come first served, parked sequences before fresh ones. A priority is a head start, not a rank:
 * nothing waits forever.
 *
 * The whole future. Each sequence has an expected length (chapter 12) and, since a sequence in decode computes one
 * position a step, a line: position x is computed in step base + x. So its pages are known for every later step: page k
 * is taken in step base + k*B and all go in step end = base + expected length - 1 (the last token is never fed). A page
 * of the tree is held until the latest end of its holders, and counted once. The calendar holds the sum for every step
 * from now on as a segment tree (change from a step on, greatest of all). The head of the queue is admitted while the greatest
 * stays within the pool, less a part for the error of the guesses (sched_slack).
 *
 *     pages |          ____            each sequence: a staircase up, one drop at its end
 *      pool |- - - ___/- - \- - -
 *           |   __/         \___
 *           +--now----------------->  steps
 *
 * When the future turns out otherwise it is written anew: a prefill that ends in another step than assumed, a sequence
 * that outlives its expected end or whose expectation moved, and every end. Where pages run out all the same, the
 * newest sequence is parked.
 *
 * Run-ahead: sched_plan does not need the tokens of earlier steps, only that they will come. n_planned counts the
 * tokens that exist or are under way, n_known those that sched_commit brought. Results of a sequence that ended, was
 * parked or cancelled meanwhile carry an old ticket and are refused. A request may say that its draws need to know all
 * tokens before them (waits: penalties, bad words); its sequences rest in a step that comes before their last token did.
 *
 * What always holds (sched_check): the calendar at `now` is the number of held pages, and at every later step what a
 * simulation of all sequences finds; slots, lists and counts agree. Nothing is allocated in sched_plan and
 * sched_commit: token buffers are taken in sched_submit. Cost: O(running) a step with a small constant, O(pages * log)
 * for one sequence's start or end. It does not know texts, stop strings, sampling or devices: the engine (chapter 18)
 * says when a sequence ended.
 * =========================================================================== */

enum { SCHED_PRIORITY = 1024 }; /* steps of head start for one level of priority */

/* ---- Pairing heap (Fredman et al., 1986) ----
 * The greatest (key, tie) is on top; insert and raise O(1), remove O(log) amortised. Links are in an array of nodes, a heap
 * is the index of its top, -1 when empty. */

typedef struct heap_node {
    int64_t key;
    uint32_t tie;
    int child, next, prev; /* prev: the one before among the siblings, or the parent */
} heap_node;

static bool heap_above(const heap_node *h, int a, int b) {
    return h[a].key != h[b].key ? h[a].key > h[b].key : (int32_t)(h[a].tie - h[b].tie) > 0;
}

static int heap_meld(heap_node *h, int a, int b) { /* two tops */
    if (a < 0 || b < 0) return a < 0 ? b : a;
    if (heap_above(h, b, a)) {
        int t = a;
        a = b, b = t;
    }
    h[b].next = h[a].child, h[b].prev = a;
    if (h[a].child >= 0) h[h[a].child].prev = b;
    h[a].child = b, h[a].next = h[a].prev = -1;
    return a;
}

static int heap_meld_all(heap_node *h, int first) { /* siblings in pairs, then the pairs from the last to the first */
    int pairs = -1, top = -1;
    while (first >= 0) {
        int a = first, b = h[a].next;
        first = b >= 0 ? h[b].next : -1;
        h[a].next = h[a].prev = -1;
        if (b >= 0) h[b].next = h[b].prev = -1;
        a = heap_meld(h, a, b);
        h[a].next = pairs, pairs = a;
    }
    while (pairs >= 0) {
        int next = h[pairs].next;
        h[pairs].next = -1;
        top = heap_meld(h, top, pairs);
        pairs = next;
    }
    return top;
}

static void heap_put(heap_node *h, int *top, int x, int64_t key, uint32_t tie) {
    h[x] = (heap_node){.key = key, .tie = tie, .child = -1, .next = -1, .prev = -1};
    *top = heap_meld(h, *top, x);
}

static void heap_cut(heap_node *h, int x) { /* x with all below it leaves its siblings */
    if (h[h[x].prev].child == x) h[h[x].prev].child = h[x].next;
    else h[h[x].prev].next = h[x].next;
    if (h[x].next >= 0) h[h[x].next].prev = h[x].prev;
    h[x].next = h[x].prev = -1;
}

static void heap_remove(heap_node *h, int *top, int x) {
    if (*top != x) heap_cut(h, x);
    int rest = heap_meld_all(h, h[x].child);
    *top = *top == x ? rest : heap_meld(h, *top, rest);
}

static void heap_rekey(heap_node *h, int *top, int x, int64_t key) {
    if (key >= h[x].key) {
        h[x].key = key;
        if (*top == x) return;
        heap_cut(h, x);
        *top = heap_meld(h, *top, x);
    } else {
        heap_remove(h, top, x);
        heap_put(h, top, x, key, h[x].tie);
    }
}

static void heap_replace(heap_node *h, int *top, int x, int y) { /* y takes x's place, key and tie */
    h[y] = h[x];
    if (h[y].child >= 0) h[h[y].child].prev = y;
    if (h[y].next >= 0) h[h[y].next].prev = y;
    if (*top == x) *top = y;
    else if (h[h[y].prev].child == x) h[h[y].prev].child = y;
    else h[h[y].prev].next = y;
}

/* ---- Calendar: pages held in each step of [now, now + n) ----
 * What is held now, and by how much that changes in each later step: leaves of a segment tree whose nodes know the sum and the
 * greatest sum of a beginning. A change is one leaf; nodes above it are stale until the peak is asked for, and made once for
 * all the changes below them. */

enum { CAL_STALE = -1 };

typedef struct cal_node {
    int sum;  /* of the changes below */
    int most; /* the greatest sum of the first k of them, k >= 0, or CAL_STALE; then all above are stale too */
} cal_node;

typedef struct calendar {
    int64_t now;
    int n;        /* power of two; the change of step t in now + 1 .. now + n is leaf t mod n */
    int held;     /* now */
    cal_node *at; /* [2n] 1: the root; the children of i are 2i and 2i + 1 */
} calendar;

/* v pages more from step t on. */
static void cal_change(calendar *c, int64_t t, int v) {
    if (t <= c->now) {
        c->held += v;
        return;
    }
    assert(t - c->now <= c->n);
    int i = (int)(t & (c->n - 1)) + c->n;
    c->at[i].sum += v, c->at[i].most = MAX(c->at[i].sum, 0);
    while ((i >>= 1) && c->at[i].most != CAL_STALE) c->at[i].most = CAL_STALE;
}

/* v more pages in steps from .. to-1. */
static void cal_add(calendar *c, int64_t from, int64_t to, int v) { cal_change(c, from, v), cal_change(c, to, -v); }

static cal_node cal_join(cal_node a, cal_node b) { return (cal_node){a.sum + b.sum, MAX(a.most, a.sum + b.most)}; }

static cal_node cal_fresh(const calendar *c, int i) {
    if (c->at[i].most == CAL_STALE) c->at[i] = cal_join(cal_fresh(c, 2 * i), cal_fresh(c, 2 * i + 1));
    return c->at[i];
}

static int cal_peak(const calendar *c) {
    int i = (int)((c->now + 1) & (c->n - 1)) + c->n;
    cal_fresh(c, 1);
    cal_node soon = c->at[i], late = {0, 0}; /* leaves from that of now + 1 to the last; those before it, which come later */
    for (; i > 1; i >>= 1) {
        if (i & 1) late = cal_join(c->at[i - 1], late);
        else soon = cal_join(soon, c->at[i + 1]);
    }
    return c->held + cal_join(soon, late).most;
}

static void cal_step(calendar *c) { /* its change has come; the leaf is free for step now + n */
    int v = c->at[((c->now + 1) & (c->n - 1)) + c->n].sum;
    if (v) cal_add(c, c->now, c->now + 1, v);
    c->now++;
}

/* ---- Types ---- */

typedef struct sched_config {
    int B, n_pages;
    int max_seqs;   /* sequences running or parked */
    int max_tokens; /* rows of a step; at least max_seqs */
    int max_len;    /* tokens of a sequence */
    int n_classes;  /* of the length predictor */
} sched_config;

typedef struct sched_job { /* what a request asks of the scheduler */
    const int32_t *prompt; /* copied */
    int n_prompt;
    int n;                 /* samples */
    int max_tokens;        /* output tokens, at least 1 */
    int min_tokens;        /* none ends before */
    bool exact;            /* every sample has max_tokens unless cancelled (ignore_eos and no stop) */
    bool waits;            /* no run-ahead: a token is drawn only when those before it are known */
    int priority;          /* higher goes earlier */
    int n_alone;           /* the first so many samples find and share no pages: they compute every position */
    uint64_t class_key;    /* requests with equal keys have outputs of like length; 0: a class of its own if n > 1 */
} sched_job;

typedef struct sched_request {
    int32_t *prompt; /* owned; NULL: this id is free */
    int n_prompt, n, max_tokens, min_tokens;
    bool exact, waits;
    int n_alone;           /* as in sched_job */
    int n_started, n_live; /* samples that ever ran; of them not ended */
    int first;             /* its live sequences, linked by sibling */
    int64_t key;           /* order of the queue, smaller first */
    uint64_t class_key;
    int next_free;
} sched_request;

enum sched_state { SCHED_FREE, SCHED_PREFILL, SCHED_DECODE, SCHED_PARKED };

typedef struct sched_seq { /* what every step touches comes first: one cache line of 64 bytes */
    _Alignas(64) uint8_t state;
    bool yields;       /* this step: its last row gives a token */
    bool is_chunk;     /* this step: its rows are of a prompt (or of what was parked), not its newest token */
    bool waits;        /* as in sched_job */
    int from, n_rows;  /* this step: positions from .. from+n_rows-1 */
    int n_cached;      /* positions whose K and V are planned */
    int n_planned;     /* tokens known or under way */
    int n_known;
    int limit;         /* prompt + max_tokens */
    uint32_t ticket;   /* changes when it is parked or ends: results with another one are late */
    int64_t end;       /* the step in which its pages are expected to go */
    int32_t *tokens;   /* [limit] prompt, then output */
    int next_edge;     /* tokens with which it reaches the next bucket of chapter 12 */
    int next_fill;     /* tokens, known and cached, with which its next page may enter the tree */
    uint32_t row_turn; /* changes when its row of pages was replaced: a device has to reload it */
    int page;          /* in decode: the page of position n_cached - 1 */

    int n_prompt, request, sample;
    int n_found;       /* positions found in the tree when it first started */
    int expect;        /* tokens it will have, prompt and output; end = base + expect - 1 */
    int64_t base;      /* position x is computed in step base + x */
    double luck;       /* share of its class that gets longer than it is expected to get; 0: not drawn */
    pred_of class;
    int bucket;
    uint32_t started;  /* number of its last admission */
    int sibling_prev, sibling;      /* live sequences of its request; -1 ends */
    int todo;          /* in prefill: tokens counted in sched.backlog */
    int64_t mark;      /* in prefill: tokens put into the backlog up to its own */
    int prefill_prev, prefill_next; /* first come first served; ends at max_seqs */
} sched_seq;

struct sched_spare { /* a free token buffer: its first bytes link it */
    struct sched_spare *next;
};

typedef struct sched {
    sched_config c;
    kv_cache kv;
    pred pred;
    calendar cal;
    int64_t now;             /* = cal.now: the step planned last */
    sched_seq *seqs;         /* [max_seqs + 1]; the last is both ends of the prefill list */
    int *free_slots;
    int n_slots_free, n_running, n_decode;
    int64_t guess2;          /* sum of sched_guess2 over running sequences */
    int64_t backlog, backlog_in; /* tokens still to prefill; all ever put in */
    heap_node *ends;         /* [n_pages + max_seqs]: pages of the tree and sequences (n_pages + q), by end */
    int *holders;            /* [n_pages] heap of what hangs on a page: child pages, sequences whose last tree page it is */
    heap_node *line;         /* [max_seqs]: parked sequences in queue order, running ones newest first */
    int parked, newest;
    sched_request *requests; /* grows in sched_submit */
    heap_node *queue;        /* [cap_requests] */
    int n_requests, cap_requests, free_request, queued;
    int n_waiting;           /* samples never started */
    int64_t arrival_step;
    int n_arrived;           /* in this step */
    uint32_t n_started, spread;
    uint64_t own_class;      /* last key given to a request without one */
    struct sched_spare *spare[32]; /* [c]: free buffers of 2^c tokens */
    int n_buffers[32], demand[32];
    uint64_t epoch, failed_epoch; /* changes with every start and end; when the head did not fit */
    int64_t failed_step;
    int64_t n_preempted, n_repredicted, n_prompt_tokens, n_prompt_hits; /* since open */
} sched;

/* ---- Token buffers ---- */

static int sched_buffer_class(int n_tokens) {
    int c = 2; /* a buffer holds at least a pointer */
    while ((int64_t)1 << c < n_tokens) c++;
    return c;
}

static void sched_buffer_give(sched *s, void *buffer, int c) {
    struct sched_spare *b = buffer;
    b->next = s->spare[c], s->spare[c] = b;
}

static void *sched_buffer_take(sched *s, int c) {
    struct sched_spare *b = s->spare[c];
    s->spare[c] = b->next;
    return b;
}

/* n more samples of this size are wanted: as many buffers as can be in use at a time. */
static void sched_buffer_reserve(sched *s, int c, int n) {
    s->demand[c] += n;
    for (; s->n_buffers[c] < MIN(s->c.max_seqs, s->demand[c]); s->n_buffers[c]++)
        sched_buffer_give(s, mem_alloc(sizeof(int32_t) << c), c);
}

/* ---- Open and close ---- */

static void sched_free(sched *s) {
    for (int q = 0; q < s->c.max_seqs; q++) free(s->seqs[q].tokens);
    for (int r = 0; r < s->n_requests; r++) free(s->requests[r].prompt);
    for (int i = 0; i < COUNT(s->spare); i++)
        while (s->spare[i]) free(sched_buffer_take(s, i));
    kv_free(&s->kv), pred_free(&s->pred);
    free(s->cal.at), free(s->seqs), free(s->line), free(s->free_slots), free(s->ends), free(s->holders);
    free(s->requests), free(s->queue);
    *s = (sched){0};
}

/* Fails when there is not the memory for so many pages and sequences of such a length; nothing is held then. */
static int sched_init(sched *s, const sched_config *c, toka_err *e) {
    assert(c->max_tokens >= c->max_seqs && c->max_len > 1);
    size_t np = (size_t)c->n_pages, ns = (size_t)c->max_seqs;
    *s = (sched){.c = *c, .parked = -1, .newest = -1, .free_request = -1, .queued = -1};
    bool fits = kv_init(&s->kv, c->B, c->n_pages, c->max_seqs, c->max_len);
    pred_init(&s->pred, c->n_classes, c->max_seqs);
    for (s->cal.n = 4; s->cal.n < 2 * (int64_t)c->max_len + 2; s->cal.n *= 2) {} /* as long a prefill delay as a sequence */
    s->cal.at = fits ? mem_try((size_t)s->cal.n * 2, sizeof *s->cal.at) : NULL;
    static_assert(offsetof(sched_seq, n_prompt) == 64, "one cache line");
    s->seqs = mem_check(aligned_alloc(64, (ns + 1) * sizeof *s->seqs));
    memset(s->seqs, 0, (ns + 1) * sizeof *s->seqs);
    s->line = mem_zalloc(ns * sizeof *s->line);
    s->free_slots = mem_alloc(ns * sizeof(int));
    s->ends = mem_try(np + ns, sizeof *s->ends), s->holders = mem_try(np, sizeof *s->holders);
    if (!s->cal.at || !s->ends || !s->holders) {
        sched_free(s);
        return fail(e, TOKA_E_MEMORY, "no memory for the tables of %d pages of KV and %d sequences of up to %d tokens", c->n_pages,
                    c->max_seqs, c->max_len);
    }
    for (int p = 0; p < c->n_pages; p++) s->holders[p] = -1;
    for (int q = c->max_seqs - 1; q >= 0; q--) s->free_slots[s->n_slots_free++] = q;
    s->seqs[c->max_seqs].prefill_prev = s->seqs[c->max_seqs].prefill_next = c->max_seqs;
    return 0;
}

/* ---- The future of one sequence in the calendar ---- */

static int sched_tail(const sched *s, int q) { /* its last page in the tree, or -1 */
    int n = s->kv.seqs[q].n_tree;
    return n ? kv_row(&s->kv, q)[n - 1] : -1;
}

/* Adds (sign 1) or takes back (-1) what q alone accounts for: n_held own pages until its end, and the pages from number
 * `next` on that it will take. */
static void sched_own(sched *s, int q, int n_held, int next, int sign) {
    const sched_seq *x = &s->seqs[q];
    int n_pages = kv_pages_for(&s->kv, MIN(x->expect, x->limit) - 1);
    for (int k = next; k < n_pages; k++) cal_change(&s->cal, x->base + (int64_t)k * s->c.B, sign);
    cal_add(&s->cal, s->now, x->end, sign * n_held);
    cal_change(&s->cal, x->end, -sign * MAX(n_pages - next, 0));
}

static void sched_own_now(sched *s, int q, int sign) {
    const kv_seq *k = &s->kv.seqs[q];
    sched_own(s, q, k->n_pages - k->n_tree, k->n_pages, sign);
}

/* What hangs on page p has changed: brings its end and those above it up to date, in the calendar too if `account`. A
 * page's end is ends[p].key, 0 while nobody holds it. */
static void sched_lift(sched *s, int p, bool account) {
    int64_t was = 0, is = 0; /* n pages go from end `was` to end `is` */
    int n = 0;
    while (p >= 0) {
        int64_t old = s->ends[p].key, new = s->holders[p] >= 0 ? s->ends[s->holders[p]].key : 0;
        if (old == new) break;
        if (n && account && (old != was || new != is)) {
            if (is > was) cal_add(&s->cal, was, is, n);
            else cal_add(&s->cal, is, was, -n);
            n = 0;
        }
        was = old, is = new, n++;
        int parent = s->kv.pages[p].parent;
        if (parent == s->kv.root) {
            s->ends[p].key = new;
            break;
        }
        if (!old) heap_put(s->ends, &s->holders[parent], p, new, 0);
        else if (!new) heap_remove(s->ends, &s->holders[parent], p), s->ends[p].key = 0;
        else heap_rekey(s->ends, &s->holders[parent], p, new);
        p = parent;
    }
    if (n && account) {
        if (is > was) cal_add(&s->cal, was, is, n);
        else cal_add(&s->cal, is, was, -n);
    }
}

static void sched_attach(sched *s, int q, bool account) {
    int tail = sched_tail(s, q);
    if (tail < 0) return;
    heap_put(s->ends, &s->holders[tail], s->c.n_pages + q, s->seqs[q].end, 0);
    sched_lift(s, tail, account);
}

static void sched_detach(sched *s, int q, int tail) {
    if (tail < 0) return;
    heap_remove(s->ends, &s->holders[tail], s->c.n_pages + q);
    sched_lift(s, tail, true);
}

/* Output pages expected of a sequence, squared; 0 if its length is fixed. */
static int64_t sched_guess2(const sched *s, const sched_seq *x) {
    int64_t n = s->requests[x->request].exact ? 0 : kv_pages_for(&s->kv, x->expect - x->n_prompt);
    return n * n;
}

/* Its line and expected length are now these. The end lies after this step, and within the calendar. */
static void sched_move(sched *s, int q, int64_t base, int expect) {
    sched_seq *x = &s->seqs[q];
    int tail = sched_tail(s, q);
    sched_own_now(s, q, -1);
    s->guess2 -= sched_guess2(s, x);
    x->base = base, x->expect = expect;
    x->end = base + expect - 1;
    s->guess2 += sched_guess2(s, x), s->epoch++;
    sched_own_now(s, q, 1);
    if (tail >= 0) {
        heap_rekey(s->ends, &s->holders[tail], s->c.n_pages + q, x->end);
        sched_lift(s, tail, true);
    }
}

/* Tokens, prompt and output, that the sequence is expected to have in the end, being at n now. Its length is that of
 * its luck; if it outlived that, or has none yet, it draws again from the lengths above n. The draws of all sequences
 * together are evenly spread (multiples of the golden section), so that also few of them stand for the whole
 * distribution. */
static int sched_expect(sched *s, sched_seq *x, int n) {
    const sched_request *r = &s->requests[x->request];
    int have = MAX(n - x->n_prompt, r->min_tokens - 1), most = x->limit - x->n_prompt;
    if (r->exact || have >= most - 1) return MAX(x->limit, n + 1);
    int length = x->luck > 0 ? pred_length(&s->pred, x->class, x->luck) : 0;
    if (length <= have) {
        s->spread += 0x9E3779B9u;
        x->luck = pred_survival(&s->pred, x->class, have) * ((double)s->spread + 0.5) / 4294967296.0;
        length = MAX(pred_length(&s->pred, x->class, x->luck), have + 1);
    }
    return x->n_prompt + MIN(length, most);
}

/* ---- Submit ---- */

static int sched_new_request(sched *s) {
    int r = s->free_request;
    if (r >= 0) {
        s->free_request = s->requests[r].next_free;
        return r;
    }
    if (s->n_requests == s->cap_requests) {
        s->cap_requests = MAX(64, s->cap_requests * 2);
        s->requests = mem_realloc(s->requests, (size_t)s->cap_requests * sizeof *s->requests);
        s->queue = mem_realloc(s->queue, (size_t)s->cap_requests * sizeof *s->queue);
    }
    return s->n_requests++;
}

/* Queues a request. Returns its id (>= 0, used again after its last sample ended) or an error code. */
static int sched_submit(sched *s, const sched_job *j, toka_err *e) {
    if (j->n_prompt < 1) return fail(e, TOKA_E_USE, "the prompt has no tokens");
    if (j->n < 1) return fail(e, TOKA_E_USE, "n is %d, at least 1 sample is needed", j->n);
    if (j->max_tokens < 1) return fail(e, TOKA_E_USE, "max_tokens is %d, at least 1 is needed", j->max_tokens);
    int64_t len = (int64_t)j->n_prompt + j->max_tokens, held = (len - 1 + s->c.B - 1) / s->c.B;
    if (len > s->c.max_len)
        return fail(e, TOKA_E_USE, "the prompt has %d tokens and max_tokens is %d, together at most %d fit (max_model_len)",
                    j->n_prompt, j->max_tokens, s->c.max_len);
    if (held > s->c.n_pages)
        return fail(e, TOKA_E_USE, "the prompt has %d tokens and max_tokens is %d, the KV cache holds %lld tokens",
                    j->n_prompt, j->max_tokens, (long long)s->c.n_pages * s->c.B);
    if (j->n > INT_MAX / 2 - s->n_waiting) return fail(e, TOKA_E_USE, "n is %d, too many samples are waiting", j->n);
    int id = sched_new_request(s), priority = MAX(-1000000, MIN(j->priority, 1000000));
    if (s->arrival_step != s->now) s->arrival_step = s->now, s->n_arrived = 0;
    sched_request *r = &s->requests[id];
    *r = (sched_request){.prompt = mem_alloc((size_t)j->n_prompt * sizeof(int32_t)), .n_prompt = j->n_prompt, .n = j->n,
                         .max_tokens = j->max_tokens, .min_tokens = MIN(j->min_tokens, j->max_tokens), .exact = j->exact,
                         .waits = j->waits, .n_alone = j->n_alone, .first = -1, .class_key = j->class_key};
    memcpy(r->prompt, j->prompt, (size_t)j->n_prompt * sizeof(int32_t));
    if (!r->class_key && j->n > 1) r->class_key = ++s->own_class | (uint64_t)1 << 63;
    r->key = (s->now - (int64_t)priority * SCHED_PRIORITY) * (1 << 24) + MIN(s->n_arrived, (1 << 24) - 1);
    s->n_arrived++, s->n_waiting += j->n;
    heap_put(s->queue, &s->queued, id, -r->key, 0);
    sched_buffer_reserve(s, sched_buffer_class((int)len), j->n);
    s->epoch++;
    return id;
}

/* ---- Ends ---- */

static void sched_prefill_leave(sched *s, int q) {
    sched_seq *x = &s->seqs[q];
    s->seqs[x->prefill_prev].prefill_next = x->prefill_next;
    s->seqs[x->prefill_next].prefill_prev = x->prefill_prev;
    s->backlog -= x->todo;
    x->todo = 0;
}

/* A running sequence gives its pages and its future back. */
static void sched_stop(sched *s, int q) {
    sched_seq *x = &s->seqs[q];
    if (x->state == SCHED_PREFILL) sched_prefill_leave(s, q);
    else s->n_decode--;
    heap_remove(s->line, &s->newest, q);
    sched_own_now(s, q, -1);
    sched_detach(s, q, sched_tail(s, q));
    kv_close(&s->kv, q);
    x->n_cached = x->n_rows = 0, x->n_planned = x->n_known;
    x->ticket++, s->n_running--, s->epoch++;
    s->guess2 -= sched_guess2(s, x);
}

static void sched_drop_request(sched *s, int id) {
    sched_request *r = &s->requests[id];
    free(r->prompt);
    *r = (sched_request){.next_free = s->free_request};
    s->free_request = id;
}

/* The sequence is over. cut: not by itself. */
static void sched_end(sched *s, int q, bool cut) {
    sched_seq *x = &s->seqs[q];
    sched_request *r = &s->requests[x->request];
    int c = sched_buffer_class(x->limit);
    if (x->state == SCHED_PARKED) heap_remove(s->line, &s->parked, q), x->ticket++, s->epoch++;
    else sched_stop(s, q);
    if (!r->exact) pred_end(&s->pred, x->class, x->bucket, x->n_known - x->n_prompt, cut);
    sched_buffer_give(s, x->tokens, c);
    s->demand[c]--;
    x->tokens = NULL, x->state = SCHED_FREE;
    s->free_slots[s->n_slots_free++] = q;
    if (x->sibling_prev >= 0) s->seqs[x->sibling_prev].sibling = x->sibling;
    else r->first = x->sibling;
    if (x->sibling >= 0) s->seqs[x->sibling].sibling_prev = x->sibling_prev;
    if (!--r->n_live && r->n_started == r->n) sched_drop_request(s, x->request);
}

/* Ends a request in whatever state its samples are. Its id is free after this. */
static void sched_cancel(sched *s, int id) {
    sched_request *r = &s->requests[id];
    assert(r->prompt);
    int waiting = r->n - r->n_started;
    if (waiting) {
        heap_remove(s->queue, &s->queued, id);
        s->n_waiting -= waiting, s->demand[sched_buffer_class(r->n_prompt + r->max_tokens)] -= waiting;
        r->n = r->n_started, s->epoch++;
    }
    if (!r->n_live) sched_drop_request(s, id);
    else
        for (int q = r->first, n = r->n_live; n--;) {
            int next = s->seqs[q].sibling;
            sched_end(s, q, true);
            q = next;
        }
}

/* ---- Admission ---- */

/* Steps until a backlog of so many tokens is prefilled, this one counted. */
static int64_t sched_prefill_steps(const sched *s, int64_t tokens) {
    int64_t rate = MAX(1, s->c.max_tokens - s->n_decode);
    return MAX(1, MIN((tokens + rate - 1) / rate, (int64_t)s->c.max_len));
}

/* Pages kept back because lengths are guesses. The error of a guess is about the guess itself, and that of the sum of
 * many the root of their squares; half of it makes preemption rare. A sixteenth of the pool at most: preemption is
 * cheap enough. */
static int sched_slack(const sched *s) { return (int)MIN(sqrt((double)s->guess2) / 2, (double)(s->c.n_pages / 16)); }

/* Would the pool hold q's whole future beside the others'? m pages of its row were found in the tree. The calendar is
 * left as it was unless it fits; then it already has q. */
static bool sched_fits(sched *s, int q, int n, int m) {
    const int *row = kv_row(&s->kv, q);
    int64_t end = s->seqs[q].end;
    int n_pages = kv_pages_for(&s->kv, n), held = m; /* leading pages of the row that somebody holds */
    while (held && s->kv.pages[row[held - 1]].ref == 0) held--;
    if (n_pages - held > kv_room(&s->kv)) return false;
    for (int sign = 1;; sign = -1) {
        sched_own(s, q, n_pages - held, n_pages, sign);
        for (int i = held; i-- && s->ends[row[i]].key < end;) cal_add(&s->cal, s->ends[row[i]].key, end, sign);
        if (sign < 0) return false;
        if (cal_peak(&s->cal) <= s->c.n_pages - sched_slack(s)) return true;
    }
}

static bool sched_alone(const sched *s, const sched_seq *x) { return x->sample < s->requests[x->request].n_alone; }

static void sched_start(sched *s, int q, int n, int m) {
    sched_seq *x = &s->seqs[q];
    kv_open(&s->kv, q, x->tokens, n, m, sched_alone(s, x));
    sched_attach(s, q, false);
    x->state = SCHED_PREFILL;
    x->started = ++s->n_started, x->row_turn++;
    x->n_cached = 0, x->n_planned = n, x->next_fill = (s->kv.seqs[q].n_tree + 1) * s->c.B;
    x->todo = n - m * s->c.B, s->backlog += x->todo, s->backlog_in += x->todo, x->mark = s->backlog_in;
    x->prefill_next = s->c.max_seqs, x->prefill_prev = s->seqs[s->c.max_seqs].prefill_prev;
    s->seqs[x->prefill_prev].prefill_next = q, s->seqs[s->c.max_seqs].prefill_prev = q;
    heap_put(s->line, &s->newest, q, s->requests[x->request].key, x->started);
    s->n_running++, s->epoch++;
    s->guess2 += sched_guess2(s, x);
    s->n_prompt_tokens += n, s->n_prompt_hits += m * s->c.B;
}

/* Where q's line would lie if it started now, with m pages found. */
static void sched_aim(sched *s, int q, int n, int m) {
    sched_seq *x = &s->seqs[q];
    x->expect = sched_expect(s, x, n);
    x->base = s->now + sched_prefill_steps(s, s->backlog + n - (int64_t)m * s->c.B) - n;
    x->end = x->base + x->expect - 1;
}

static bool sched_admit_parked(sched *s, int q) {
    sched_seq *x = &s->seqs[q];
    int n = x->n_known, m = sched_alone(s, x) ? 0 : kv_match(&s->kv, kv_row(&s->kv, q), x->tokens, n);
    sched_aim(s, q, n, m);
    if (!sched_fits(s, q, n, m)) return false;
    heap_remove(s->line, &s->parked, q);
    sched_start(s, q, n, m);
    return true;
}

static bool sched_admit_fresh(sched *s, int id) {
    if (!s->n_slots_free) return false;
    sched_request *r = &s->requests[id];
    int q = s->free_slots[s->n_slots_free - 1], n = r->n_prompt;
    int m = r->n_started < r->n_alone ? 0 : kv_match(&s->kv, kv_row(&s->kv, q), r->prompt, n);
    sched_seq *x = &s->seqs[q];
    *x = (sched_seq){.request = id, .sample = r->n_started, .waits = r->waits, .n_prompt = n, .n_known = n, .n_found = m * s->c.B,
                     .limit = n + r->max_tokens, .ticket = x->ticket, .row_turn = x->row_turn, .class = {-1, 0},
                     .next_edge = n + s->pred.edge[1], .sibling = r->first, .sibling_prev = -1};
    if (!r->exact) x->class = pred_find(&s->pred, r->class_key);
    sched_aim(s, q, n, m);
    if (!sched_fits(s, q, n, m)) return false;
    s->n_slots_free--;
    x->tokens = sched_buffer_take(s, sched_buffer_class(x->limit));
    memcpy(x->tokens, r->prompt, (size_t)n * sizeof(int32_t));
    if (r->first >= 0) s->seqs[r->first].sibling_prev = q;
    r->first = q, r->n_live++;
    if (++r->n_started == r->n) heap_remove(s->queue, &s->queued, id);
    s->n_waiting--;
    if (!r->exact) pred_reach(&s->pred, x->class, 0);
    sched_start(s, q, n, m);
    return true;
}

/* Starts sequences from the head of the queue while they fit. No more than two steps of prefill are taken in: more
 * would only hold pages. A head that did not fit is tried again when something started or ended, or after some steps. */
static void sched_admit(sched *s) {
    if (s->epoch == s->failed_epoch && s->now < s->failed_step + 16) return;
    while ((s->parked >= 0 || s->queued >= 0) && s->backlog < 2 * (int64_t)s->c.max_tokens) {
        bool parked = s->parked >= 0 && (s->queued < 0 || !s->n_slots_free || /* it has a slot */
                                         s->line[s->parked].key >= s->queue[s->queued].key);
        if (parked ? sched_admit_parked(s, s->parked) : sched_admit_fresh(s, s->queued)) continue;
        assert(s->n_running || !s->n_slots_free); /* alone, every request fits */
        s->failed_epoch = s->epoch, s->failed_step = s->now;
        return;
    }
}

static void sched_preempt(sched *s) { /* parks the newest */
    int q = s->newest;
    sched_stop(s, q);
    s->seqs[q].state = SCHED_PARKED;
    heap_put(s->line, &s->parked, q, -s->requests[s->seqs[q].request].key, -s->seqs[q].started);
    s->n_preempted++;
}

/* ---- One step ---- */

static bool sched_rests(const sched_seq *x) { return x->waits && x->n_known < x->n_planned; }

static bool sched_needs_page(const sched *s, const sched_seq *x) {
    return x->state == SCHED_DECODE && x->n_planned < x->limit && x->n_cached % s->c.B == 0 && !sched_rests(x);
}

/* Writes the future anew where time has shown it wrong: a sequence at its expected end, a prefill that should be over.
 * Returns the number of pages that decoding sequences need for this step. */
static int sched_review(sched *s) {
    int need = 0;
    for (int q = 0; q < s->c.max_seqs; q++) {
        sched_seq *x = &s->seqs[q];
        if (x->state != SCHED_PREFILL && x->state != SCHED_DECODE) continue;
        x->n_rows = 0, x->yields = false;
        int64_t base = x->base;
        if (x->state == SCHED_PREFILL && base + x->n_known <= s->now) { /* its last row was to be computed before now */
            int64_t ahead = MAX(x->mark - (s->backlog_in - s->backlog), (int64_t)x->todo);
            base = s->now + sched_prefill_steps(s, ahead) - x->n_known;
        }
        if (base != x->base || x->end <= s->now) {
            int least = (int)(s->now + 2 - base); /* tokens of which the last is not fed before the next step */
            int expect = x->end <= s->now ? sched_expect(s, x, MIN(x->n_planned, x->limit - 1)) : x->expect;
            sched_move(s, q, base, MAX(expect, least));
            s->n_repredicted++;
        }
        need += sched_needs_page(s, x);
    }
    return need;
}

/* A sequence in decode took a page: has what is expected of it moved by much? */
static void sched_reconsider(sched *s, int q) {
    sched_seq *x = &s->seqs[q];
    int expect = sched_expect(s, x, x->n_planned), by = abs(expect - x->expect);
    if (by <= s->c.B || by <= (x->expect - x->n_planned) / 4) return;
    expect = MAX(expect, (int)(s->now + 2 - x->base));
    if (expect == x->expect) return;
    sched_move(s, q, x->base, expect);
    s->n_repredicted++;
}

static int sched_feed_decode(sched *s) {
    int n = 0;
    for (int q = 0; q < s->c.max_seqs; q++) {
        sched_seq *x = &s->seqs[q];
        if (x->state != SCHED_DECODE || x->n_planned >= x->limit) continue;
        if (sched_rests(x)) {
            sched_move(s, q, x->base + 1, x->expect); /* all of its future comes a step later */
            continue;
        }
        if (sched_needs_page(s, x)) {
            x->page = kv_grow(&s->kv, q);
            if (!s->requests[x->request].exact) sched_reconsider(s, q);
        }
        x->from = x->n_cached++, x->n_rows = 1, x->yields = true, x->is_chunk = false;
        x->n_planned++, n++;
    }
    return n;
}

/* Hands the rest of the step's tokens to the sequences in prefill, first come first served. */
static int sched_feed_prefill(sched *s, int budget) {
    int n_fed = 0;
    for (int q = s->seqs[s->c.max_seqs].prefill_next, next; q != s->c.max_seqs && n_fed < budget; q = next) {
        sched_seq *x = &s->seqs[q];
        next = x->prefill_next;
        x->from = kv_skip(&s->kv, q, x->n_cached);
        x->n_rows = MIN(x->n_known - x->from, budget - n_fed);
        x->is_chunk = true, x->yields = false;
        x->n_cached = x->from + x->n_rows, n_fed += x->n_rows;
        kv_computed(&s->kv, q, x->from, x->n_cached);
        int left = MIN(x->todo, x->n_known - x->n_cached);
        s->backlog -= x->todo - left, x->todo = left;
        if (x->n_cached < x->n_known) continue;
        sched_prefill_leave(s, q);
        x->state = SCHED_DECODE, x->yields = true, x->n_planned++, s->n_decode++;
        x->page = kv_row(&s->kv, q)[s->kv.seqs[q].n_pages - 1];
        int64_t base = s->now + 1 - x->n_known;
        if (base != x->base) sched_move(s, q, base, x->expect);
    }
    return n_fed;
}

/* Plans the next step. Returns its number of rows; 0: nothing can run until something is submitted or committed. */
static int sched_plan(sched *s) {
    cal_step(&s->cal), s->now++;
    int need = sched_review(s);
    while (need > kv_room(&s->kv)) {
        need -= sched_needs_page(s, &s->seqs[s->newest]);
        sched_preempt(s);
    }
    int n = sched_feed_decode(s);
    sched_admit(s);
    return n + sched_feed_prefill(s, s->c.max_tokens - n);
}

/* ---- Commit ---- */

/* Full pages of known tokens enter the tree. */
static void sched_fill(sched *s, int q) {
    sched_seq *x = &s->seqs[q];
    const kv_seq *k = &s->kv.seqs[q];
    while (!k->stray && (k->n_tree + 1) * s->c.B <= MIN(x->n_known, x->n_cached)) {
        int tail = sched_tail(s, q), node = s->c.n_pages + q;
        enum kv_filled how = kv_fill(&s->kv, q, x->tokens);
        if (how == KV_STRAY) break;
        int page = sched_tail(s, q);
        if (how == KV_ENTERED) { /* the page takes the sequence's place, at the same end: the calendar stays */
            s->ends[page].key = x->end;
            if (tail >= 0) heap_replace(s->ends, &s->holders[tail], node, page);
            heap_put(s->ends, &s->holders[page], node, x->end, 0);
        } else { /* one page less of its own, one more holder of the twin */
            cal_add(&s->cal, s->now, x->end, -1);
            if (tail >= 0) heap_remove(s->ends, &s->holders[tail], node); /* below its end there is the twin's now */
            sched_attach(s, q, true);
            x->row_turn++, x->page = kv_row(&s->kv, q)[k->n_pages - 1];
        }
    }
    x->next_fill = k->stray ? INT_MAX : (k->n_tree + 1) * s->c.B;
}

enum sched_result { SCHED_LATE, SCHED_ON, SCHED_DONE };

/* The token that a row of q yielded. ended: it is the last one (end id, stop); the limit is seen here. SCHED_LATE: the
 * sequence that was planned is not there any more, the token means nothing. SCHED_DONE: q is free now. */
static enum sched_result sched_commit(sched *s, int q, uint32_t ticket, int32_t token, bool ended) {
    sched_seq *x = &s->seqs[q];
    if (x->ticket != ticket || x->state != SCHED_DECODE) return SCHED_LATE;
    assert(x->n_known < x->n_planned);
    x->tokens[x->n_known++] = token;
    if (ended || x->n_known == x->limit) {
        sched_fill(s, q);
        sched_end(s, q, !ended);
        return SCHED_DONE;
    }
    if (x->n_known == x->next_edge) {
        if (!s->requests[x->request].exact) pred_reach(&s->pred, x->class, x->bucket + 1);
        x->next_edge = x->n_prompt + s->pred.edge[++x->bucket + 1];
    }
    if (x->n_known >= x->next_fill) sched_fill(s, q);
    return SCHED_ON;
}

/* ---- The whole state, checked: NULL, or what is wrong. For tests; costs O(everything) ---- */

static const char *sched_check_seq(const sched *s, int q) {
    const sched_seq *x = &s->seqs[q];
    const kv_seq *k = &s->kv.seqs[q];
    KV_MUST(x->n_known <= x->n_planned && x->n_known >= x->n_prompt && x->n_known < x->limit && x->n_planned <= x->limit);
    if (x->state == SCHED_PARKED) {
        KV_MUST(!k->n_pages && !x->n_cached && x->n_planned == x->n_known);
        return NULL;
    }
    KV_MUST(x->end > s->now && x->end == x->base + x->expect - 1);
    KV_MUST(k->n_pages * s->c.B >= x->n_cached);
    KV_MUST(x->state != SCHED_DECODE || x->page == kv_row(&s->kv, q)[(x->n_cached - 1) / s->c.B]);
    if (x->state == SCHED_PREFILL) {
        KV_MUST(x->n_cached < x->n_known && x->base + x->n_known > s->now);
        KV_MUST(k->n_pages == kv_pages_for(&s->kv, x->n_known));
    } else KV_MUST(x->n_cached == x->n_planned - 1 && (x->n_planned == x->limit || x->base == s->now + 1 - x->n_cached));
    for (int i = 0; i < k->n_tree; i++) {
        int p = kv_row(&s->kv, q)[i];
        KV_MUST(s->ends[p].key >= x->end);
        KV_MUST((i + 1) * s->c.B > x->n_cached || s->kv.pages[p].ready);
    }
    return NULL;
}

/* Between a plan and the next one. */
UNUSED static const char *sched_check(const sched *s) {
    int n = s->cal.n, np = s->c.n_pages, n_state[4] = {0}, n_held = 0;
    int64_t guess2 = 0;
    bool *open = mem_zalloc((size_t)s->c.max_seqs * sizeof *open);
    int *change = mem_zalloc(((size_t)n + 1) * sizeof *change); /* of the sum, step by step from now */
    int64_t *end = mem_zalloc((size_t)np * sizeof *end), backlog = 0;
    const char *bad = NULL;
    for (int q = 0; q < s->c.max_seqs; q++) {
        const sched_seq *x = &s->seqs[q];
        const kv_seq *k = &s->kv.seqs[q];
        n_state[x->state]++, backlog += x->todo;
        if (x->state == SCHED_FREE) continue;
        if (!bad) bad = sched_check_seq(s, q);
        if (bad || x->state == SCHED_PARKED) continue;
        open[q] = true, guess2 += sched_guess2(s, x);
        for (int i = 0; i < k->n_tree; i++) end[kv_row(&s->kv, q)[i]] = MAX(end[kv_row(&s->kv, q)[i]], x->end);
        for (int i = k->n_tree; i < kv_pages_for(&s->kv, MIN(x->expect, x->limit) - 1); i++) {
            int64_t from = i < k->n_pages ? s->now : x->base + (int64_t)i * s->c.B;
            if (from < x->end) change[from - s->now]++, change[x->end - s->now]--;
        }
    }
    for (int p = 0; p < np; p++) {
        n_held += s->kv.pages[p].ref > 0;
        if (!bad && s->ends[p].key != end[p]) bad = "the end of a page is not the last end of its holders";
        if (end[p]) change[0]++, change[end[p] - s->now]--;
    }
    for (int t = 0, sum = 0, known = s->cal.held, peak = 0; t < n; t++) {
        sum += change[t], peak = MAX(peak, sum), known += t ? s->cal.at[((s->now + t) & (n - 1)) + n].sum : 0;
        if (!bad && known != sum) bad = "the calendar is not the sum of the sequences";
        if (!bad && !t && sum != n_held) bad = "the calendar does not know what is held now";
        if (!bad && t == n - 1 && cal_peak(&s->cal) != peak) bad = "the calendar's peak is wrong";
    }
    if (!bad) bad = kv_check(&s->kv, open);
    bool counts = n_state[SCHED_FREE] == s->n_slots_free && n_state[SCHED_DECODE] == s->n_decode && backlog == s->backlog &&
                  n_state[SCHED_DECODE] + n_state[SCHED_PREFILL] == s->n_running && guess2 == s->guess2;
    if (!bad && !counts) bad = "counts do not agree";
    free(open), free(change), free(end);
    return bad;
}

/* ===========================================================================
 * MARK: 14. Batch building and shared prefixes [pure]
 * In: what sched_plan decided. Out: a batch_step, which is a toka_step with its arrays (rows, slots, spans, pages) and the
 * rows that yield a token; and what a device that keeps the state of its slots needs to be told (batch_upload).
 *
 * Rows stand in the order of chapter 11, so the rows of all sequences that share a page are side by side, and with lcp
 * (leading pages in common with the sequence before) the sharing is a tree of intervals, found with one stack in one
 * pass:
 *
 *      lcp      0   3   3   2   5   0          a node: a run of rows and the pages they all have
 *      rows   [ a   b   c   d   e ] f               [a b c d e] pages 0-1
 *               [a   b   c]  [d   e]                [a b c] page 2    [d e] pages 2-4
 *
 * Per node the backend's costs decide: as one span over all its rows its pages are read once per tile of rows, but
 * every row has one partial result more to merge; otherwise each child reads them by itself, as a part of its own span.
 * Decided from the top, where a node's span begins where the last shared span above it ends. No threshold, no flag, any
 * number of levels.
 *
 *      worth it:  (reads by the children - reads together) * tokens  >  merge_tok * rows + span_tok
 *
 * Only pages that lie before all rows of the run are shared, so a shared span needs no mask; rows of prefill chunks
 * take part like any others.
 *
 * A step that was built owes nothing to the scheduler: the pages that its spans read are copied, those of a shared span
 * once, those of each own span behind them. So any number of steps can be on their way while the next is planned.
 *
 * What always holds: for each row the spans cover positions 0 .. p exactly once, in rising kv0. No allocation after
 * batch_init and batch_step_init. Cost: O(rows + running sequences + pages of their spans).
 * =========================================================================== */

typedef struct batch_cost { /* of a backend's attention, in tokens of K and V read for one row */
    int merge_tok; /* merging one more partial result into a row */
    int span_tok;  /* one more span */
    int tile_rows; /* rows that one read of K and V serves */
} batch_cost;

typedef struct batch_out { /* a row that yields a token, and for whom: what sched_commit wants to know */
    int row, q;
    uint32_t ticket;
} batch_out;

/* A step as it was built, valid until its owner builds another one into it. Its first n_spans - n_seq spans are shared ones,
 * then each sequence has one of its own. */
typedef struct batch_step {
    toka_step step;            /* all but out, n_out and logits, which are the engine's */
    int32_t *ids, *pos, *slot; /* [max_tokens] */
    int32_t *pages;            /* [max_seqs][most pages of one] so many if all of them are read by own spans */
    toka_span *spans;          /* [2 * max_seqs] */
    batch_out *outs;           /* [max_seqs] */
    int *seq;                  /* [max_seqs] slots of the sequences with rows, in their order */
    int *row0;                 /* [max_seqs + 1] first row of each; T */
    int n_pages, n_out, n_seq;
} batch_step;

/* What changed for a device that keeps for each slot its row of pages, length, last token and sampling parameters, and that
 * by itself adds 1 to a length, feeds the last token and stores a new one. Flat arrays, ready to be copied up. Most of what a
 * slot is loaded with, another slot has: the pages of the prompt and, among samples of one request, all parameters but the
 * number of the sample. So it says from which. A slot that others take from takes nothing itself in the same step: a
 * device first loads those with from -1, then, in any order, the rest. */
typedef struct batch_join { /* a slot is loaded anew */
    int32_t q, n_pages, length, limit, sample;
    int32_t from, n_from; /* its first n_from pages are those of slot `from`; -1, 0: none. The others are in join_pages */
    int32_t params_of;    /* slot with the same parameters, which may be q; -1: they come along, BATCH_PARAM_BYTES of the engine's */
} batch_join;
typedef struct batch_grown { /* slot q has one page more at its end */
    int32_t q, page;
} batch_grown;
typedef struct batch_chunk { /* sequence number `at` of the order feeds n_rows known tokens, not its last one */
    int32_t at, from, n_rows, ids; /* ids: where they begin in chunk_ids; equal ones are there once */
} batch_chunk;
typedef struct batch_group { /* a shared span; its pages are those of slot q from position kv0 on */
    int32_t row0, n_rows, kv0, n_kv, q;
} batch_group;

enum { BATCH_PARAM_BYTES = 64 };
enum { BATCH_AHEAD = 8 }; /* sequences, and their rows of pages, lie far apart: they are asked for so many turns early */

typedef struct batch_upload {
    uint16_t *order;     /* [n_order] slots in row order; sent if new_order */
    batch_join *joins;   /* [n_joins] */
    int32_t *join_pages;
    batch_grown *grown;
    batch_chunk *chunks;
    int32_t *chunk_ids;
    batch_group *groups; /* [n_groups] in the order of the step's spans; sent if new_groups */
    int n_order, n_joins, n_join_pages, n_params, n_grown, n_chunks, n_chunk_ids, n_groups;
    bool new_order, new_groups;
} batch_upload;

typedef struct batch_node { /* a run of rows with its shared pages, while the tree is built */
    int lcp, row0, rows;
    int reads; /* of its pages, if each child reads them by itself */
    int parent;
    int cover; /* leading pages that shared spans cover, this node's included */
    int q;     /* one that has the pages */
} batch_node;

typedef struct batch { /* what building a step takes: the tree of this one, and what the device was told by those before */
    batch_cost cost;
    int *seq_node, *seq_pages; /* [max_seqs] the node that each sequence of the step hangs on; pages that its rows see */
    int n_nodes, n_closed, depth;
    batch_node *nodes;         /* [max_seqs + 1] 0: the root, no page */
    int *stack, *closed;       /* [max_seqs + 1] open nodes; nodes in the order in which they were closed, children first */
    uint32_t *sent_turn;       /* [max_seqs] what the device has: the version of the row, its pages (0: nothing), and which */
    int *sent_pages;           /* admission of a sequence it was */
    uint32_t *sent_start;
    int whole, common, near;   /* slot whose row is not made from another's in this upload, -1; leading pages that the next
                                * row has in common with that; and with the row before it */
    batch_upload up;
} batch;

static void batch_step_free(batch_step *d) {
    free(d->ids), free(d->pos), free(d->slot), free(d->pages), free(d->spans), free(d->outs), free(d->seq), free(d->row0);
    *d = (batch_step){0};
}

/* Fails when there is not the memory for the pages of so many sequences of such a length; nothing is held then. */
static int batch_step_init(batch_step *d, const sched *s, toka_err *e) {
    size_t ns = (size_t)s->c.max_seqs, nt = (size_t)s->c.max_tokens, n_pages = ns * (size_t)s->kv.cap;
    *d = (batch_step){.pages = n_pages <= INT_MAX ? mem_try(n_pages, sizeof *d->pages) : NULL}; /* touched as far as spans need */
    if (!d->pages)
        return fail(e, TOKA_E_MEMORY, "no memory for the pages that a step of %d sequences of up to %d tokens reads", s->c.max_seqs,
                    s->c.max_len);
    d->ids = mem_alloc(nt * sizeof *d->ids), d->pos = mem_alloc(nt * sizeof *d->pos), d->slot = mem_alloc(nt * sizeof *d->slot);
    d->spans = mem_alloc(2 * ns * sizeof *d->spans), d->outs = mem_alloc(ns * sizeof *d->outs);
    d->seq = mem_alloc(ns * sizeof *d->seq), d->row0 = mem_alloc((ns + 1) * sizeof *d->row0);
    return 0;
}

static void batch_free(batch *b) {
    batch_upload *u = &b->up;
    free(b->seq_node), free(b->seq_pages), free(b->nodes), free(b->stack), free(b->closed);
    free(b->sent_turn), free(b->sent_pages), free(b->sent_start);
    free(u->order), free(u->joins), free(u->join_pages), free(u->grown), free(u->chunks), free(u->chunk_ids);
    free(u->groups);
    *b = (batch){0};
}

/* Fails when there is not the memory for rows of pages of such a length; nothing is held then. */
static int batch_init(batch *b, const sched *s, batch_cost cost, toka_err *e) {
    size_t ns = (size_t)s->c.max_seqs, nt = (size_t)s->c.max_tokens;
    assert(s->c.max_seqs <= UINT16_MAX + 1 && cost.tile_rows > 0);
    *b = (batch){.cost = cost};
    b->seq_node = mem_alloc(ns * sizeof *b->seq_node), b->seq_pages = mem_alloc(ns * sizeof *b->seq_pages);
    b->nodes = mem_alloc((ns + 1) * sizeof *b->nodes), b->stack = mem_alloc((ns + 1) * sizeof *b->stack);
    b->closed = mem_alloc((ns + 1) * sizeof *b->closed);
    b->sent_turn = mem_zalloc(ns * sizeof *b->sent_turn), b->sent_pages = mem_zalloc(ns * sizeof *b->sent_pages);
    b->sent_start = mem_zalloc(ns * sizeof *b->sent_start);
    batch_upload *u = &b->up;
    u->order = mem_alloc(ns * sizeof *u->order), u->joins = mem_alloc(ns * sizeof *u->joins);
    u->join_pages = mem_try(ns * (size_t)s->kv.cap, sizeof *u->join_pages); /* touched as far as joins come */
    u->grown = mem_alloc(ns * sizeof *u->grown), u->chunks = mem_alloc(ns * sizeof *u->chunks);
    u->chunk_ids = mem_alloc(nt * sizeof *u->chunk_ids), u->groups = mem_zalloc(ns * sizeof *u->groups);
    if (u->join_pages) return 0;
    batch_free(b);
    return fail(e, TOKA_E_MEMORY, "no memory for the pages of %d sequences of up to %d tokens", s->c.max_seqs, s->c.max_len);
}

/* ---- Rows ---- */

/* The rows of q, the first in page number i of its row of pages. Returns how many pages they see. */
static int batch_rows(batch_step *d, const sched *s, int q, int i) {
    const sched_seq *x = &s->seqs[q];
    const int *row = kv_row(&s->kv, q);
    int B = s->c.B, t = d->step.T, offset = x->from - i * B;
    for (int p = x->from; p < x->from + x->n_rows; p++, t++, offset++) {
        if (offset == B) offset = 0, i++;
        int page = x->is_chunk ? row[i] : x->page; /* its row of pages may not be in the cache yet */
        d->ids[t] = p < x->n_known ? x->tokens[p] : -1 - q;
        d->pos[t] = p;
        d->slot[t] = page * B + offset;
    }
    d->step.T = t;
    if (x->yields) d->outs[d->n_out++] = (batch_out){t - 1, q, x->ticket};
    return i + 1;
}

static void batch_load(batch *b, const sched *s, int q) {
    batch_upload *u = &b->up;
    const sched_seq *x = &s->seqs[q];
    bool best = b->whole >= 0 && b->near <= b->common; /* else this one goes up whole, for those behind it to take from */
    int n = s->kv.seqs[q].n_pages, n_from = best ? MIN(b->common, n) : 0, from = n_from ? b->whole : -1, params_of = -1;
    if (b->sent_start[q] == x->started) params_of = q; /* only its row is another */
    else if (n_from && s->seqs[from].request == x->request) params_of = from;
    u->n_params += params_of < 0;
    u->joins[u->n_joins++] = (batch_join){q, n, x->from, x->limit, x->sample, from, n_from, params_of};
    memcpy(u->join_pages + u->n_join_pages, kv_row(&s->kv, q) + n_from, (size_t)(n - n_from) * sizeof(int32_t));
    u->n_join_pages += n - n_from;
    b->sent_turn[q] = x->row_turn, b->sent_start[q] = x->started;
}

static void batch_feed(batch *b, const sched_seq *x, int at) { /* a chunk of a prompt: samples of one request have the same */
    batch_upload *u = &b->up;
    const batch_chunk *last = u->n_chunks ? &u->chunks[u->n_chunks - 1] : NULL;
    size_t bytes = (size_t)x->n_rows * sizeof(int32_t);
    int first = u->n_chunk_ids;
    if (last && last->n_rows == x->n_rows && !memcmp(u->chunk_ids + last->ids, x->tokens + x->from, bytes)) first = last->ids;
    else memcpy(u->chunk_ids + first, x->tokens + x->from, bytes), u->n_chunk_ids += x->n_rows;
    u->chunks[u->n_chunks++] = (batch_chunk){at, x->from, x->n_rows, first};
}

/* What the device does not know yet of q, which is sequence number `at` of the order. */
static void batch_tell(batch *b, const sched *s, int q, int at) {
    batch_upload *u = &b->up;
    const sched_seq *x = &s->seqs[q];
    int n = s->kv.seqs[q].n_pages;
    bool copied = false;
    if (at >= u->n_order || u->order[at] != q) u->new_order = true;
    u->order[at] = (uint16_t)q;
    if (b->sent_turn[q] != x->row_turn) batch_load(b, s, q), copied = u->joins[u->n_joins - 1].n_from > 0;
    else if (n > b->sent_pages[q]) u->grown[u->n_grown++] = (batch_grown){q, kv_row(&s->kv, q)[n - 1]};
    b->sent_pages[q] = n, b->near = INT_MAX;
    if (!copied) b->whole = q, b->common = INT_MAX;
    if (x->is_chunk) batch_feed(b, x, at);
}

/* ---- The tree of intervals ---- */

static int batch_reads(const batch *b, int rows) { return (rows + b->cost.tile_rows - 1) / b->cost.tile_rows; }

/* A run of rows that is complete hangs below node `parent`. */
static void batch_hang(batch *b, int parent, int row0, int rows, int q) {
    batch_node *n = &b->nodes[parent];
    if (!n->rows) n->row0 = row0, n->q = q;
    n->rows += rows, n->reads += batch_reads(b, rows);
}

/* The next sequence has l pages in common with the last one of d, so every run with more pages is complete. The run that ends
 * with it (first it alone, then the nodes that close) is hung below what is left open. */
static void batch_next(batch *b, const batch_step *d, int l) {
    int child = -1, e = d->n_seq - 1, q = d->seq[e], row0 = d->row0[e], rows = d->step.T - row0;
    for (;;) {
        int top = b->stack[b->depth - 1];
        if (b->nodes[top].lcp < l) {
            top = ++b->n_nodes;
            b->nodes[top] = (batch_node){.lcp = l};
            b->stack[b->depth++] = top;
        }
        batch_hang(b, top, row0, rows, q);
        if (child < 0) b->seq_node[e] = top;
        else b->nodes[child].parent = top;
        if (b->nodes[top].lcp == l) return;
        b->depth--;
        b->closed[b->n_closed++] = child = top;
        row0 = b->nodes[top].row0, rows = b->nodes[top].rows;
    }
}

/* ---- Spans ---- */

/* A span over n_rows rows, over n_kv positions in n pages of q's row of pages from number `from` on. */
static void batch_span(batch_step *d, const sched *s, int row0, int n_rows, int q, int from, int n, int n_kv) {
    memcpy(d->pages + d->n_pages, kv_row(&s->kv, q) + from, (size_t)n * sizeof *d->pages);
    d->spans[d->step.n_spans++] = (toka_span){row0, n_rows, d->n_pages, from * s->c.B, n_kv};
    d->n_pages += n;
}

static void batch_share(batch *b, batch_step *d, const sched *s, const batch_node *n, int from) { /* one over all rows of the node */
    batch_upload *u = &b->up;
    batch_group group = {n->row0, n->rows, from * s->c.B, (n->lcp - from) * s->c.B, n->q};
    batch_span(d, s, group.row0, group.n_rows, group.q, from, n->lcp - from, group.n_kv);
    u->new_groups |= memcmp(&u->groups[u->n_groups], &group, sizeof group) != 0;
    u->groups[u->n_groups++] = group;
}

/* Every sequence's own span, over what no shared one covers. */
static void batch_own_spans(const batch *b, batch_step *d, const sched *s) {
    for (int e = 0, far = BATCH_AHEAD; e < d->n_seq; e++, far++) {
        if (far < d->n_seq) __builtin_prefetch(kv_row(&s->kv, d->seq[far]) + b->nodes[b->seq_node[far]].cover);
        int from = b->nodes[b->seq_node[e]].cover, row0 = d->row0[e], end = d->row0[e + 1];
        batch_span(d, s, row0, end - row0, d->seq[e], from, b->seq_pages[e] - from, d->pos[end - 1] + 1 - from * s->c.B);
    }
}

/* Decides from the top which nodes get a span; then every sequence its own. */
static void batch_spans(batch *b, batch_step *d, const sched *s) {
    const batch_cost *c = &b->cost;
    int n_groups = b->up.n_groups;
    b->up.n_groups = 0;
    for (int i = b->n_closed - 1; i >= 0; i--) {
        batch_node *n = &b->nodes[b->closed[i]];
        n->cover = b->nodes[n->parent].cover;
        int64_t saved = (int64_t)(n->reads - batch_reads(b, n->rows)) * (n->lcp - n->cover) * s->c.B;
        if (saved <= (int64_t)c->merge_tok * n->rows + c->span_tok) continue;
        batch_share(b, d, s, n, n->cover);
        n->cover = n->lcp;
    }
    b->up.new_groups |= n_groups != b->up.n_groups;
    batch_own_spans(b, d, s);
}

static void batch_begin(batch *b, batch_step *d) {
    batch_upload *u = &b->up;
    d->step = (toka_step){.ids = d->ids, .pos = d->pos, .slot = d->slot, .pages = d->pages, .spans = d->spans};
    d->n_seq = d->n_out = d->n_pages = d->row0[0] = b->n_nodes = b->n_closed = 0, b->depth = 1, b->stack[0] = 0;
    b->nodes[0] = (batch_node){0};
    u->n_joins = u->n_join_pages = u->n_params = u->n_grown = u->n_chunks = u->n_chunk_ids = 0;
    u->new_order = u->new_groups = false;
    b->whole = -1, b->common = b->near = 0;
}

/* Builds the step that sched_plan just planned. */
static void batch_build(batch *b, batch_step *d, const sched *s) {
    const kv_seq *k = s->kv.seqs;
    batch_upload *u = &b->up;
    int shared = 0; /* pages in common with the sequence before in d->seq */
    batch_begin(b, d);
    for (int q = k[s->c.max_seqs].next; q != s->c.max_seqs; q = k[q].next) {
        const sched_seq *x = &s->seqs[q];
        int far = d->n_seq + BATCH_AHEAD, lcp = k[q].lcp;
        if (far < u->n_order) __builtin_prefetch(&s->seqs[u->order[far]]), __builtin_prefetch(&k[u->order[far]]);
        b->common = MIN(b->common, lcp), b->near = MIN(b->near, lcp);
        shared = MIN(shared, lcp); /* only pages before all rows of both */
        if (!x->n_rows) continue;
        int first = x->from / s->c.B;
        if (d->n_seq) batch_next(b, d, MIN(shared, first));
        shared = first;
        batch_tell(b, s, q, d->n_seq);
        b->seq_pages[d->n_seq] = batch_rows(d, s, q, first);
        d->seq[d->n_seq++] = q, d->row0[d->n_seq] = d->step.T;
    }
    if (d->n_seq) batch_next(b, d, 0);
    u->new_order |= u->n_order != d->n_seq;
    u->n_order = d->n_seq;
    batch_spans(b, d, s);
}

/* Bytes that go up to a device for this step. */
UNUSED static size_t batch_upload_bytes(const batch_upload *u) {
    size_t n = (size_t)u->n_joins * sizeof *u->joins + (size_t)u->n_params * BATCH_PARAM_BYTES;
    n += (size_t)u->n_join_pages * sizeof *u->join_pages;
    n += (size_t)u->n_grown * sizeof *u->grown;
    n += (size_t)u->n_chunks * sizeof *u->chunks + (size_t)u->n_chunk_ids * sizeof *u->chunk_ids;
    if (u->new_order) n += (size_t)u->n_order * sizeof *u->order;
    if (u->new_groups) n += (size_t)u->n_groups * sizeof *u->groups;
    return n;
}

/* ===========================================================================
 * MARK: 15. Sampling and stops [pure]
 * In: one row of raw logits [V] and what its request asks for. Out: a token id with its log-probabilities. And: the text of
 * the tokens in pieces; out: the text that is certain, and the word that a stop string was completed.
 *
 * samp_row works in the order of Hugging Face's generate():
 *   1. clean      NaN counts as -inf, +inf as FLT_MAX; the raw log-sum-exp and the best raw logits are taken here
 *   2. adjust     logit_bias, allowed ids, forbidden ids, repetition penalty (prompt and output: x < 0 ? x*r : x/r),
 *                 frequency and presence penalty (output only: x - f*count - p)
 *   3. greedy     (temperature 0) the highest adjusted logit, the lowest id on a tie; ends here
 *   4. cut        temperature, then top-k (all ids tied with the k-th stay), then top-p (the smallest set, best first, that
 *                 reaches p; of tied ids the lowest stay), then min-p (probability >= min_p * the best one's)
 *   5. draw       the inverse of the cumulative distribution in order of ids, at one uniform number of 53 bits
 * Every filter of step 4 keeps the head of one and the same order (logit falling, id rising), so what they leave is
 * described by a single samp_cut, and no list of candidates and no sort is needed.
 *
 * What always holds:
 *   - The pick is a pure function of (logits, parameters, history, seed, sample, position). Step 5 takes its number from
 *     Philox with key = seed and counter = (sample, position, lane, 0). The weights do not depend on the libm.
 *   - A drawn id has a positive probability; sums are in double, a probability is off by less than 1e-11 of itself.
 *   - No malloc, no state: the row is worked on in place, stack use stays under 100 KB. Any number of threads.
 *   - When nothing may be drawn (every logit is -inf after step 2) the pick is the lowest id that is allowed and not
 *     forbidden, with sampled_logprob 0.
 * logprob is of the raw logits (step 1), -inf where the logit is. Step 2 overwrites a raw logit; for the picked id it is
 * recomputed by undoing the adjustments, exact to the rounding of the adjusted logit (4e-6 when |logit| < 64).
 * sampled_logprob is of the distribution drawn from (after step 4); a greedy pick has 0, the logarithm of 1; a forced id,
 * for which nothing is drawn, has its logprob.
 *
 * Not here: which ids end a sequence, counting tokens against min_tokens and max_tokens (chapter 18).
 * =========================================================================== */

#define SAMP_MAX_STOPS 256       /* stop strings of one request */
#define SAMP_MAX_STOP_BYTES 4096 /* of one stop string; ids of one bad word */
#define SAMP_MAX_BAD 4096        /* bad words of one request */
#define SAMP_WINDOW 16384        /* ids looked at together where a row needs a counter per id */
#define SAMP_BLOCKS 512          /* partial sums of a row, for the draw */
#define SAMP_LANES 16            /* independent sums side by side, so that a compiler can use vectors */

/* ---- Checking parameters ---- */

static int samp_check_range(const char *name, double v, double low, double high, bool open_low, toka_err *e) {
    if (v >= low && v <= high && !(open_low && v == low)) return 0; /* NaN fails the first comparison */
    return fail(e, TOKA_E_USE, "%s: %g, expected %s%g to %g", name, v, open_low ? "more than " : "", low, high);
}

static int samp_check_int(const char *name, int v, int low, int high, toka_err *e) {
    if (v >= low && v <= high) return 0;
    if (high == INT_MAX) return fail(e, TOKA_E_USE, "%s: %d, expected %d or more", name, v, low);
    return fail(e, TOKA_E_USE, "%s: %d, expected %d to %d", name, v, low, high);
}

static int samp_check_ids(const char *name, const int32_t *id, int n, int V, toka_err *e) {
    if (n < 0) return fail(e, TOKA_E_USE, "%s: %d entries, expected 0 or more", name, n);
    if (n && !id) return fail(e, TOKA_E_USE, "%s: no ids given, expected %d", name, n);
    for (int i = 0; i < n; i++)
        if (id[i] < 0 || id[i] >= V)
            return fail(e, TOKA_E_USE, "%s[%d]: id %d, expected 0 to %d", name, i, (int)id[i], V - 1);
    return 0;
}

static int samp_check_stops(const toka_sampling *s, toka_err *e) {
    if (s->n_stop < 0 || s->n_stop > SAMP_MAX_STOPS)
        return fail(e, TOKA_E_USE, "stop: %d texts, expected at most %d", s->n_stop, SAMP_MAX_STOPS);
    if (s->n_stop && !s->stop) return fail(e, TOKA_E_USE, "stop: no strings given, expected %d", s->n_stop);
    for (int i = 0; i < s->n_stop; i++) {
        size_t n = s->stop[i] ? strlen(s->stop[i]) : 0;
        if (!n || n > SAMP_MAX_STOP_BYTES)
            return fail(e, TOKA_E_USE, "stop[%d]: %zu bytes, expected 1 to %d", i, n, SAMP_MAX_STOP_BYTES);
        for (const char *p = s->stop[i], *end = p + n; p < end;) {
            int step = utf8_len(p, end);
            if (!step) return fail(e, TOKA_E_USE, "stop[%d]: byte %d is not valid UTF-8", i, (int)(p - s->stop[i]));
            p += step;
        }
    }
    return 0;
}

static int samp_check_bad(const toka_sampling *s, int V, toka_err *e) {
    int n = 0;
    if (s->n_bad < 0 || s->n_bad > SAMP_MAX_BAD)
        return fail(e, TOKA_E_USE, "bad_words: %d sequences of ids, expected at most %d", s->n_bad, SAMP_MAX_BAD);
    if (s->n_bad && !s->bad_lengths) return fail(e, TOKA_E_USE, "bad_words: no lengths given, expected %d", s->n_bad);
    for (int i = 0; i < s->n_bad; n += s->bad_lengths[i++])
        if (s->bad_lengths[i] < 1 || s->bad_lengths[i] > SAMP_MAX_STOP_BYTES)
            return fail(e, TOKA_E_USE, "bad_words[%d]: %d ids, expected 1 to %d", i, s->bad_lengths[i], SAMP_MAX_STOP_BYTES);
    return samp_check_ids("bad_words", s->bad_ids, n, V, e);
}

/* Checks ranges; V: vocabulary. The message names field, value and what is allowed. The ranges are OpenAI's and vLLM's. */
static int samp_check(const toka_sampling *s, int V, toka_err *e) {
    if (samp_check_range("temperature", s->temperature, 0, FLT_MAX, false, e)) return e->code;
    if (samp_check_range("top_p", s->top_p, 0, 1, true, e)) return e->code;
    if (samp_check_range("min_p", s->min_p, 0, 1, false, e)) return e->code;
    if (samp_check_int("top_k", s->top_k, -1, INT_MAX, e)) return e->code;
    if (samp_check_range("repetition_penalty", s->repetition_penalty, 0, FLT_MAX, true, e)) return e->code;
    if (samp_check_range("presence_penalty", s->presence_penalty, -2, 2, false, e)) return e->code;
    if (samp_check_range("frequency_penalty", s->frequency_penalty, -2, 2, false, e)) return e->code;
    if (samp_check_int("max_tokens", s->max_tokens, 0, INT_MAX, e)) return e->code;
    if (samp_check_int("min_tokens", s->min_tokens, 0, s->max_tokens ? s->max_tokens : INT_MAX, e)) return e->code;
    if (samp_check_int("logprobs", s->logprobs, 0, TOKA_MAX_LOGPROBS, e)) return e->code;
    if (samp_check_ids("stop_token_ids", s->stop_ids, s->n_stop_ids, V, e)) return e->code;
    if (samp_check_ids("allowed_token_ids", s->allowed_ids, s->n_allowed, V, e)) return e->code;
    if (samp_check_ids("logit_bias", s->bias_ids, s->n_bias, V, e)) return e->code;
    if (s->n_bias && !s->bias_values) return fail(e, TOKA_E_USE, "logit_bias: no values given, expected %d", s->n_bias);
    for (int i = 0; i < s->n_bias; i++)
        if (samp_check_range("logit_bias", s->bias_values[i], -100, 100, false, e)) return e->code;
    return samp_check_bad(s, V, e) ? e->code : samp_check_stops(s, e);
}

/* ---- Random numbers ---- */

/* Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011): ten rounds that mix a
 * counter of four words under a key of two. */
static void samp_philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
        c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1;
        c[1] = (uint32_t)b;
        c[3] = (uint32_t)a;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
}

/* 64 random bits, for ever the same for the same arguments. lane: independent numbers for one token; the draw takes 0. */
static uint64_t samp_random(uint64_t seed, uint32_t sample, uint32_t position, uint32_t lane) {
    uint32_t c[4] = {sample, position, lane, 0};
    samp_philox(c, (uint32_t)seed, (uint32_t)(seed >> 32));
    return (uint64_t)c[1] << 32 | c[0];
}

/* ---- Exponentials and sums of a row ---- */

/* e^d for d <= 0, relative error under 1e-12 down to -660, exactly 0 below -694. d = n ln2 + r with |r| <= ln2/2: a Taylor
 * polynomial in r, then n is added to the exponent bits. No call and no branch, so that loops over it become vector code
 * (gcc wants -fno-trapping-math for that). */
static inline double samp_exp(double d) {
    const double round = 0x1.8p52; /* adding it leaves the nearest integer in the low mantissa bits */
    double at = d > -700 ? d : -700;
    double shifted = at * 1.4426950408889634 + round, n = shifted - round;
    double r = (at - n * 0x1.62e42fefa0000p-1) - n * 0x1.cf79abc9e3b3ap-40; /* ln2 in two parts, n * first exact */
    double p = 1.0 / 3628800;
    p = p * r + 1.0 / 362880, p = p * r + 1.0 / 40320, p = p * r + 1.0 / 5040, p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120, p = p * r + 1.0 / 24, p = p * r + 1.0 / 6, p = p * r + 0.5, p = p * r + 1, p = p * r + 1;
    uint64_t bits, add;
    memcpy(&bits, &p, 8), memcpy(&add, &shifted, 8);
    bits += add << 52;
    memcpy(&p, &bits, 8);
    p -= 0x1p-1000; /* nothing beside a p that matters; what is below becomes exactly 0 */
    return p > 0 ? p : 0;
}

/* Sum of e^((x - max) * scale) over x[0 .. n-1]: exponentials into a small array, then SAMP_LANES sums side by side. */
static double samp_sum(const float *x, int n, double max, double scale) {
    double w[16 * SAMP_LANES], lane[SAMP_LANES] = {0}, sum = 0;
    int i = 0;
    for (; i + COUNT(w) <= n; i += COUNT(w)) {
        for (int j = 0; j < COUNT(w); j++) w[j] = samp_exp((x[i + j] - max) * scale);
        for (int j = 0; j < COUNT(w); j += SAMP_LANES)
            for (int k = 0; k < SAMP_LANES; k++) lane[k] += w[j + k];
    }
    for (; i < n; i++) sum += samp_exp((x[i] - max) * scale);
    for (int k = 0; k < SAMP_LANES; k++) sum += lane[k];
    return sum;
}

static float samp_max(const float *x, int n) {
    float lane[SAMP_LANES];
    for (int j = 0; j < SAMP_LANES; j++) lane[j] = -INFINITY;
    int i = 0;
    for (; i + SAMP_LANES <= n; i += SAMP_LANES)
        for (int j = 0; j < SAMP_LANES; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (; i < n; i++) lane[0] = MAX(lane[0], x[i]);
    for (int j = 1; j < SAMP_LANES; j++) lane[0] = MAX(lane[0], lane[j]);
    return lane[0];
}

static inline float samp_clean(float x) { /* NaN: -inf, +inf: FLT_MAX, so that differences to the maximum are never NaN */
    x = x > FLT_MAX ? FLT_MAX : x;
    return x >= -FLT_MAX ? x : -INFINITY;
}

typedef struct samp_norm { /* log-sum-exp of a row as max + log_sum: kept apart, a huge maximum does not swallow the rest */
    double max, log_sum;
} samp_norm;

static float samp_logprob(double x, samp_norm norm) {
    return x == -INFINITY ? -INFINITY : (float)(x - norm.max - norm.log_sum);
}

/* The n best ids by logit, best first, of equal ones the lowest first. A logit that is not better than the n-th costs one
 * comparison. */
static void samp_top(const float *x, int V, int n, samp_norm norm, toka_pick *pick) {
    int have = 0;
    float *best = pick->top_logprobs; /* holds logits until the end */
    for (int id = 0; id < V; id++) {
        if (have == n && !(x[id] > best[n - 1])) continue;
        int at = have < n ? have++ : n - 1;
        for (; at > 0 && x[id] > best[at - 1]; at--) best[at] = best[at - 1], pick->top_ids[at] = pick->top_ids[at - 1];
        best[at] = x[id], pick->top_ids[at] = id;
    }
    for (int i = 0; i < n; i++) best[i] = samp_logprob(best[i], norm);
    pick->n_top = n;
}

/* ---- Step 2: bias, masks, penalties ---- */

/* Everything but allowed_ids becomes -inf, whatever order the list has: a window of the vocabulary at a time is marked. */
static void samp_allow(const toka_sampling *s, float *x, int V) {
    for (int from = 0; from < V; from += SAMP_WINDOW) {
        bool allowed[SAMP_WINDOW];
        int n = MIN(SAMP_WINDOW, V - from);
        memset(allowed, 0, (size_t)n);
        for (int i = 0; i < s->n_allowed; i++) {
            uint32_t at = (uint32_t)s->allowed_ids[i] - (uint32_t)from;
            if (at < (uint32_t)n) allowed[at] = true;
        }
        for (int i = 0; i < n; i++)
            if (!allowed[i]) x[from + i] = -INFINITY;
    }
}

#define SAMP_SEEN 0x80000000u /* beside a count: the id is in the history */

static float samp_penalty(const toka_sampling *s, float x, int count) { /* count: occurrences in the output */
    float r = s->repetition_penalty;
    x = x < 0 ? x * r : x / r;
    x -= s->frequency_penalty * (float)count;
    if (count) x -= s->presence_penalty;
    return samp_clean(x);
}

/* Applies the penalties once to each id of the history. The counts of one window of the vocabulary fit on the stack; the
 * history is read once per window, and again to use each count and clear it. Cost: n_history * V / SAMP_WINDOW. */
static void samp_penalties(const toka_out_row *row, float *x, int V) {
    const toka_sampling *s = row->sampling;
    uint32_t counts[SAMP_WINDOW]; /* SAMP_SEEN + occurrences in the output; all 0 between windows */
    int first = s->repetition_penalty == 1 ? row->n_prompt : 0;
    memset(counts, 0, (size_t)MIN(SAMP_WINDOW, V) * sizeof *counts);
    for (int from = 0; from < V; from += SAMP_WINDOW) {
        uint32_t n = (uint32_t)MIN(SAMP_WINDOW, V - from);
        for (int i = first; i < row->n_history; i++) {
            uint32_t at = (uint32_t)row->history[i] - (uint32_t)from;
            if (at < n) counts[at] = (counts[at] | SAMP_SEEN) + (i >= row->n_prompt);
        }
        for (int i = first; i < row->n_history; i++) {
            uint32_t at = (uint32_t)row->history[i] - (uint32_t)from;
            if (at >= n || !counts[at]) continue;
            x[from + (int)at] = samp_penalty(s, x[from + (int)at], (int)(counts[at] & ~SAMP_SEEN));
            counts[at] = 0;
        }
    }
}

static bool samp_has_penalties(const toka_sampling *s) {
    return s->repetition_penalty != 1 || s->frequency_penalty != 0 || s->presence_penalty != 0;
}

/* Does what may be drawn depend on which tokens were drawn before? */
static bool samp_needs_history(const toka_sampling *s) { return samp_has_penalties(s) || s->n_bad; }

static void samp_adjust(const toka_out_row *row, float *x, int V) {
    const toka_sampling *s = row->sampling;
    for (int i = 0; i < s->n_bias; i++) { /* an id named twice gets both */
        float *at = &x[s->bias_ids[i]];
        *at = samp_clean(*at + s->bias_values[i]);
    }
    if (s->n_allowed) samp_allow(s, x, V);
    for (int i = 0; i < row->n_forbidden; i++) /* a model's end ids may lie outside its vocabulary */
        if ((uint32_t)row->forbidden[i] < (uint32_t)V) x[row->forbidden[i]] = -INFINITY;
    if (samp_has_penalties(s)) samp_penalties(row, x, V);
}

/* The raw logit that samp_adjust made into x at id: its steps backwards. Never above the raw maximum. */
static double samp_unadjust(const toka_out_row *row, int32_t id, double x, double raw_max) {
    const toka_sampling *s = row->sampling;
    if (samp_has_penalties(s)) {
        int count = 0;
        bool seen = false;
        for (int i = 0; i < row->n_history; i++)
            if (row->history[i] == id) seen = true, count += i >= row->n_prompt;
        if (count) x += (double)s->frequency_penalty * count + s->presence_penalty;
        if (seen) x = x < 0 ? x / s->repetition_penalty : x * s->repetition_penalty;
    }
    for (int i = 0; i < s->n_bias; i++)
        if (s->bias_ids[i] == id) x -= s->bias_values[i];
    return MIN(x, raw_max);
}

static bool samp_listed(const int32_t *list, int n, int32_t id) {
    for (int i = 0; i < n; i++)
        if (list[i] == id) return true;
    return false;
}

/* ---- Step 4: the cut ---- */

/* Which ids of a row may be drawn: logits above `at`, and of those equal to it the ids up to last_tied. */
typedef struct samp_cut {
    float at;
    int last_tied;
} samp_cut;

/* A row as a distribution: the weight of id is e^((x[id] - max) * scale), 0 where the cut leaves it out. */
typedef struct samp_dist {
    const float *x; /* [V] adjusted logits, none NaN or +inf */
    int V;
    double max, scale; /* highest logit, 1 / temperature */
    samp_cut cut;
} samp_dist;

static inline bool samp_kept(const samp_dist *d, int id) {
    return d->x[id] > d->cut.at || (d->x[id] == d->cut.at && id <= d->cut.last_tied);
}
static inline double samp_weight(const samp_dist *d, float x) { return samp_exp((x - d->max) * d->scale); }

/* Total weight of the ids from .. to-1. */
static double samp_block_sum(const samp_dist *d, int from, int to) {
    if (d->cut.at == -INFINITY) return samp_sum(d->x + from, to - from, d->max, d->scale);
    double sum = 0;
    for (int id = from; id < to; id++)
        if (samp_kept(d, id)) sum += samp_weight(d, d->x[id]);
    return sum;
}

/* Order-preserving map of floats to integers and back (-0 counts as +0). */
static inline uint32_t samp_key(float x) {
    uint32_t u;
    x += 0.0f;
    memcpy(&u, &x, 4);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
static float samp_unkey(uint32_t key) {
    uint32_t u = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* Goes through the kept ids from the highest logit down, adding up 1 for each (by_count) or its weight, and returns the
 * logit at which the sum reaches `want`; *above is the sum before the first id of that logit. A radix search: each of four
 * passes over the row fixes 8 bits of the logit's key by a histogram of the ids that agree in the bits before. */
static float samp_reach(const samp_dist *d, bool by_count, double want, double *above) {
    uint32_t found = 0, known = 0; /* the key's bits found so far, and a mask of them */
    *above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        double bins[256] = {0};
        for (int id = 0; id < d->V; id++) {
            if (!samp_kept(d, id)) continue;
            uint32_t key = samp_key(d->x[id]);
            if ((key & known) != found) continue;
            bins[key >> shift & 255] += by_count ? 1 : samp_weight(d, d->x[id]);
        }
        int bin = -1; /* in the end the first, from the top, that reaches; if none does by rounding, the lowest in use */
        double before = 0, passed = *above;
        for (int b = 255; b >= 0 && (bin < 0 || passed < want); b--) {
            if (bins[b] == 0) continue;
            bin = b, before = passed, passed += bins[b];
        }
        assert(bin >= 0);
        *above = before;
        found |= (uint32_t)bin << shift, known |= 255u << shift;
    }
    return samp_unkey(found);
}

static void samp_top_k(samp_dist *d, int k) {
    double above;
    d->cut = (samp_cut){samp_reach(d, true, k, &above), INT_MAX};
}

/* Keeps what has at least min_p times the weight of the best, which is 1. */
static void samp_min_p(samp_dist *d, double min_p) {
    double lowest = d->max + log(min_p) / d->scale; /* weight >= min_p means x >= lowest */
    float at = (float)MAX(lowest, -FLT_MAX);
    if (at < lowest) at = nextafterf(at, INFINITY);
    if (at > d->cut.at) d->cut = (samp_cut){at, INT_MAX};
}

/* Hugging Face removes, from the lowest probability up, what adds up to at most 1 - p; in other words an id stays if those
 * before it, from the highest down, add up to less than p. All weights up to a V-th of what may go can go at once, since V
 * of them would not be too much: that leaves the search few ids. */
static void samp_top_p(samp_dist *d, double p) {
    double above, total = samp_block_sum(d, 0, d->V);
    samp_min_p(d, MIN(1.0, (1 - p) * total / d->V));
    float at = samp_reach(d, false, p * total, &above);
    double tied = MAX(1.0, ceil((p * total - above) / samp_weight(d, at))); /* how many ids with this logit stay */
    int last = -1;
    for (int id = 0; id < d->V && tied > 0; id++)
        if (d->x[id] == at) last = id, tied--;
    d->cut = (samp_cut){at, last};
}

static void samp_truncate(samp_dist *d, const toka_sampling *s) {
    if (s->top_k > 0 && s->top_k < d->V) samp_top_k(d, s->top_k);
    if (s->top_p < 1) samp_top_p(d, s->top_p);
    if (s->min_p > 0) samp_min_p(d, s->min_p);
}

/* ---- Step 5: the draw ---- */

/* The id at which the cumulative weight passes u times the total, u in [0,1): by sums of blocks, then within one block. */
static int32_t samp_draw(const samp_dist *d, double u, double *total) {
    double sums[SAMP_BLOCKS], sum = 0;
    int block = MAX(1024, (d->V + SAMP_BLOCKS - 1) / SAMP_BLOCKS), n = (d->V + block - 1) / block, b;
    for (int i = 0; i < n; i++) sum += sums[i] = samp_block_sum(d, i * block, MIN(d->V, (i + 1) * block));
    *total = sum;
    double target = u * sum, passed = 0;
    int last = 0; /* the last block with weight; rounding can carry the search past the total */
    for (b = 0; b < n; b++) {
        if (sums[b] > 0) last = b;
        if (passed + sums[b] > target) break;
        passed += sums[b];
    }
    if (b == n) b = last;
    int32_t id = -1;
    for (int i = b * block; i < MIN(d->V, (b + 1) * block); i++) {
        double w = samp_kept(d, i) ? samp_weight(d, d->x[i]) : 0;
        if (w == 0) continue;
        id = i, passed += w;
        if (passed > target) break;
    }
    return id;
}

/* Steps 3 to 5 over adjusted logits with a finite maximum. */
static int32_t samp_choose(const toka_out_row *row, const float *x, int V, float max, float *sampled_logprob) {
    const toka_sampling *s = row->sampling;
    *sampled_logprob = 0;
    if (s->temperature == 0) {
        int32_t id = 0;
        while (x[id] != max) id++;
        return id;
    }
    samp_dist d = {.x = x, .V = V, .max = max, .scale = 1 / (double)s->temperature, .cut = {-INFINITY, -1}};
    samp_truncate(&d, s);
    double u = (double)(samp_random(s->seed, row->sample, row->position, 0) >> 11) * 0x1p-53, total;
    int32_t id = samp_draw(&d, u, &total);
    *sampled_logprob = (float)((x[id] - d.max) * d.scale - log(total));
    return id;
}

/* From a row of raw logits [V] to a pick. The logits are overwritten. See the chapter's head. */
static void samp_row(const toka_out_row *row, float *logits, int V, toka_pick *pick) {
    const toka_sampling *s = row->sampling;
    assert(V > 0 && row->forced_id < V && (s || row->forced_id >= 0));
    for (int i = 0; i < V; i++) logits[i] = samp_clean(logits[i]);
    samp_norm norm = {.max = samp_max(logits, V)};
    if (norm.max > -INFINITY) norm.log_sum = log(samp_sum(logits, V, norm.max, 1));
    pick->n_top = 0;
    if (s && s->logprobs > 0) samp_top(logits, V, MIN(MIN(s->logprobs, TOKA_MAX_LOGPROBS), V), norm, pick);
    if (row->forced_id >= 0) {
        pick->id = row->forced_id;
        pick->logprob = pick->sampled_logprob = samp_logprob(logits[row->forced_id], norm);
        return;
    }
    samp_adjust(row, logits, V);
    float max = samp_max(logits, V);
    pick->sampled_logprob = 0;
    pick->id = max == -INFINITY ? toka_last_resort(row, V) : samp_choose(row, logits, V, max, &pick->sampled_logprob);
    pick->logprob = samp_logprob(samp_unadjust(row, pick->id, logits[pick->id], norm.max), norm);
    for (int i = 0; i < pick->n_top; i++) /* the same figure in both places, also where undoing costs a rounding */
        if (pick->top_ids[i] == pick->id) pick->logprob = pick->top_logprobs[i];
}

/* ---- Bad words ---- */

/* Appends to out the last ids of the bad words that one more id would complete: the words of one id, and those whose other ids
 * the output ends in. */
static void samp_bad_ids(const toka_sampling *s, const int32_t *output, int n_output, ids *out) {
    const int32_t *word = s->bad_ids;
    for (int i = 0; i < s->n_bad; word += s->bad_lengths[i++]) {
        int before = s->bad_lengths[i] - 1;
        if (before > n_output || memcmp(word, output + n_output - before, (size_t)before * sizeof *word)) continue;
        ids_push(out, word[before]);
    }
}

/* ---- Stop strings ---- */

/* Watches for stop strings in a text that comes in pieces, cut anywhere. The stop string that is complete first ends the
 * text (of several that end at the same byte, the longest), so the outcome does not depend on the cuts. What could still
 * become a stop string is held back: the longest end of the text that is the beginning of one, found by Knuth-Morris-Pratt
 * for each string side by side. A byte costs O(n_stop). Stop strings are whole characters (samp_check), so text is never
 * held back or ended inside a character. */
typedef struct stop_one {
    str text;
    int index;   /* in the list given to stop_init */
    int *back;   /* [text.n + 1] back[i]: length of the longest proper end of text[0..i) that is also its beginning */
    int matched; /* bytes of `text` that the text seen so far ends in, less than text.n */
} stop_one;

typedef struct stop_scan {
    stop_one *stops; /* [n_stops], one allocation with their tables */
    int n_stops;
    int which; /* of the stop string that ended it: its index in the list given to stop_init */
    bool include_stop, ended;
    bool open;         /* the text ends in the beginning of a stop string */
    uint64_t first[4]; /* a bit for each byte that begins one: while not open, others need no look */
    buf held; /* text not yet given out: its end of max(matched) bytes is the beginning of a stop string */
} stop_scan;

/* Prefix function: a beginning grows by a byte, or falls back to the next shorter beginning. */
static int stop_advance(const stop_one *one, int matched, char c) {
    while (matched > 0 && one->text.p[matched] != c) matched = one->back[matched];
    return matched + (one->text.p[matched] == c);
}

/* `stop` is borrowed until stop_free. Empty strings are left out. */
static void stop_init(stop_scan *s, const char *const *stop, int n_stop, bool include_stop) {
    size_t ints = 0;
    for (int i = 0; i < n_stop; i++) ints += strlen(stop[i]) + 1;
    *s = (stop_scan){.include_stop = include_stop, .which = -1};
    if (!n_stop) return;
    s->stops = mem_zalloc((size_t)n_stop * sizeof *s->stops + ints * sizeof(int));
    int *back = (int *)(s->stops + n_stop);
    for (int i = 0; i < n_stop; i++) {
        str text = str_c(stop[i]);
        if (!text.n) continue;
        stop_one *one = &s->stops[s->n_stops++];
        *one = (stop_one){.text = text, .index = i, .back = back};
        s->first[(unsigned char)*text.p >> 6] |= (uint64_t)1 << (*text.p & 63);
        back += text.n + 1;
        for (size_t b = 1; b < text.n; b++) one->back[b + 1] = stop_advance(one, one->back[b], text.p[b]);
    }
}

/* One byte. Returns the length of the longest stop string that it completes, or 0; s->which says which one. */
static size_t stop_byte(stop_scan *s, char c) {
    size_t longest = 0;
    bool open = false;
    if (!s->open && !(s->first[(unsigned char)c >> 6] >> (c & 63) & 1)) return 0;
    for (int i = 0; i < s->n_stops; i++) {
        stop_one *one = &s->stops[i];
        one->matched = stop_advance(one, one->matched, c);
        if ((size_t)one->matched == one->text.n) {
            if (one->text.n > longest) longest = one->text.n, s->which = one->index;
            one->matched = one->back[one->matched];
        }
        open |= one->matched > 0;
    }
    s->open = open;
    return longest;
}

/* Feeds the text of one token and appends to `out` what is now certain. True: a stop string was completed; out then has all
 * before it (with include_stop it too) and nothing behind it; later calls add nothing and return true again.
 * armed false (min_tokens not reached): a stop string whose last byte is in this piece is ordinary text; one that begins in
 * this piece and ends in an armed one counts. */
static bool stop_put(stop_scan *s, str text, bool armed, buf *out) {
    if (s->ended) return true;
    for (size_t i = 0; i < text.n; i++) {
        size_t n = stop_byte(s, text.p[i]);
        if (!n || !armed) continue;
        buf_put(&s->held, text.p, i + 1);
        buf_put(out, s->held.p, s->held.n - (s->include_stop ? 0 : n));
        buf_clear(&s->held);
        return s->ended = true;
    }
    size_t keep = 0;
    for (int i = 0; i < s->n_stops && s->open; i++) keep = MAX(keep, (size_t)s->stops[i].matched);
    if (!keep && !s->held.n) {
        buf_str(out, text);
        return false;
    }
    buf_str(&s->held, text);
    size_t certain = s->held.n - keep;
    buf_put(out, s->held.p, certain);
    if (keep) memmove(s->held.p, s->held.p + certain, keep);
    s->held.n = keep;
    return false;
}

/* The end of the text: what was held back comes out. */
static void stop_end(stop_scan *s, buf *out) {
    buf_str(out, buf_view(&s->held));
    buf_clear(&s->held);
    s->ended = true;
}

static void stop_free(stop_scan *s) {
    free(s->stops);
    buf_free(&s->held);
    *s = (stop_scan){0};
}

/* ===========================================================================
 * MARK: 16. CPU backend [cpu]
 * The table of toka.h on the CPU: toka_cpu. In: one step's plan of integers, activations in float32, weights where they
 * lie in the mapped file (bf16, f16, f32). Out: the residual stream, K and V in their pages, picks. Sums are float32.
 *
 * What always holds: the bytes of a row's result depend on that row alone. Not on T or on the other rows of the step, not
 * on the number of threads, not on how a prompt was cut into chunks or the attention into spans. Three rules give that:
 *   - A product y[t][n] = sum over k of x[t][k] w[n][k] has one order in every tile shape: k in blocks of kernels.block;
 *     in a block lane j of one vector sums the k with k % lanes == j in rising order; one fixed tree sums the lanes; blocks
 *     add up in order.
 *   - Attention walks the kv positions page by page in rising order and merges each page into a running softmax. Spans
 *     begin and end on page borders, so how they are cut changes nothing. What a row may not see adds an exact zero.
 *   - Threads share out whole results, never parts of one sum. Tensor ranks do share sums over heads and mlp columns; their
 *     parts are added in the order of the ranks. So another number of them rounds differently, as another set of kernels does.
 * Instruction sets differ in lanes and thus in rounding; one process uses one set.
 *
 * Products. Lanes lie along k because both x and w have k contiguous: one row of x (decode) streams w straight from memory,
 * and many rows (prefill) use the same tile over a panel of w that was unpacked to float32 once and then stays in cache.
 *
 * K and V memory, per layer, page and kv head, so that lanes lie along the contiguous side in both uses:
 *     K [D][Bp]  transposed: one q element times 16 neighbour positions      Bp, Dp: B, D rounded up to 16;
 *     V [B][Dp]  one probability times 16 neighbour elements of a value      the rest of a line is zero
 *
 * Tried and not kept: a set of kernels for AVX512_BF16. Its products take x as bf16, so x = hi + lo (each row split in place) and two
 * products for one; results within 2e-6, bytes equal in every cut. It wins nowhere (one core, 2026-11; AVX-512 -> AVX512_BF16):
 *                                                            Xeon with AMX                           EPYC Zen 4
 *     multiply-adds/s, registers only, two products for one  88 G -> 21 G                            59 G -> 58 G
 *     prefill of 512 tokens, layers of Llama-3.2-1B          118 -> 37 GFLOP/s                       not run
 *     decode, the same, from memory                          13.0 to 13.5 -> 13.0 to 13.8 GB/s       not run
 *     decode of 1 / 4 / 12 rows, embedded model, in cache    2352 / 5440 / 6490 -> 2198 / 3402 / 3783 tok/s
 *
 * It does not: plan, free pages, check plans beyond cheap asserts, or draw tokens (samp_row of chapter 15 does).
 * =========================================================================== */

enum {
    CPU_BLOCK = 1024,         /* largest k per block of a product; a multiple of 16 as all of them */
    CPU_PANEL = 64,           /* rows of a weight that are unpacked together: up to 256 KB of float32, second cache level */
    /* floats from row to row; not a power of two, else all rows fall into the same cache sets */
    CPU_PANEL_LD = CPU_BLOCK + 16,
    CPU_DIRECT = 12,          /* up to this many rows of x, w is unpacked in registers each time */
    CPU_CHUNK = 512,          /* tokens that go through one op's scratch at once */
    CPU_OUT_CHUNK = 64,       /* rows of logits held at once */
    CPU_SCRATCH = 128 << 20,  /* bytes that chunks are cut down to */
    CPU_HEAD = 256,           /* largest D */
    CPU_QUERIES = 32,         /* query rows (token, head of one kv head) that share one pass over K and V */
    CPU_THREADS = 1024,       /* most threads */
    CPU_SMALL = 60000,        /* multiply-adds below which waking a second thread costs more than it gives */
    CPU_SPIN = 2000,          /* looks at the pool's state before a thread sleeps; some 50 us */
    CPU_RANKS = 64,           /* most ranks of a group */
    CPU_LINK = 4              /* steps that a stage may be ahead of the next */
};
#define CPU_PATIENCE 30.0 /* seconds in which no rank gets on, until who waits gives up */

/* Unrolls a loop of constant count wholly, so that its array of vectors becomes registers. */
#ifdef __clang__
#define CPU_UNROLL _Pragma("clang loop unroll(full)")
#define CPU_TWICE _Pragma("clang loop unroll_count(2)")
#else
#define CPU_UNROLL _Pragma("GCC unroll 8")
#define CPU_TWICE _Pragma("GCC unroll 2")
#endif
#define CPU_INLINE __attribute__((always_inline)) static inline

static int cpu_up16(int n) { return (n + 15) & ~15; }

/* ---- Kernels: what they take -------------------------------------------------------------------------------- */

/* y[m][n] = sum over k of x[m][k] w[n][k] for one block of k and a tile of at most [kernels.rows][4] results, or [1][8]. */
typedef struct cpu_tile {
    const float *x; /* [m][k], rows ldx floats apart */
    const char *w;  /* [n][k] of some dtype, rows w_step bytes apart */
    float *y;       /* [m][n], rows ldy floats apart */
    size_t ldx, w_step, ldy;
    int m, n, k; /* k: a multiple of 16 */
    bool add;    /* y += instead of y = */
    bool ahead;  /* w comes from memory and these are its first readers: see cpu_tile_ahead */
} cpu_tile;

/* c[r][j] (+)= sum over k, in rising order, of a[r][k] b[k][j]. The two products of attention. */
typedef struct cpu_outer {
    const float *a, *b;
    float *c;
    size_t lda, ldb, ldc; /* floats from row to row */
    int rows, k, n;       /* n: a multiple of 16 */
    bool add;
} cpu_outer;

/* One row's running softmax: acc / sum is the output so far, both relative to exp(best). */
typedef struct cpu_softmax {
    float *acc; /* [Dp] */
    float best, sum;
} cpu_softmax;

/* The kernels of one instruction set. */
typedef struct cpu_kernels {
    const char *name;
    int rows;  /* rows of x in the largest tile */
    int block; /* k per block of a product: rows + 4 rows of it stay in the first cache levels; at most CPU_BLOCK */
    void (*tile[3])(const cpu_tile *t);                                             /* by toka_dtype */
    void (*unpack)(float *to, const void *from, toka_dtype type, int n);            /* n elements to float32 */
    void (*outer)(const cpu_outer *o);
    void (*soften)(cpu_softmax *st, float *s, int n, int from, int to, int dp); /* cpu_soften in this set's encoding */
} cpu_kernels;

/* ---- Scalars and bodies shared by the instruction sets ---- */

static float cpu_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static float cpu_half(uint16_t h) { /* f16 to float32, exact, as cpu_halves_c */
    uint32_t rest = (uint32_t)(h & 0x7FFF) << 13, top = rest >= 0x0F800000 ? 0x7F800000 : 0;
    float f = cpu_bits(rest) * 0x1p112f;
    memcpy(&rest, &f, 4);
    return cpu_bits(rest | top | (uint32_t)(h & 0x8000) << 16);
}

static float cpu_element(const void *p, toka_dtype type, size_t i) {
    uint16_t h;
    float f;
    if (type == TOKA_F32) return memcpy(&f, (const char *)p + 4 * i, 4), f;
    memcpy(&h, (const char *)p + 2 * i, 2);
    return type == TOKA_BF16 ? cpu_bits((uint32_t)h << 16) : cpu_half(h);
}

static size_t cpu_dtype_bytes(toka_dtype type) { return type == TOKA_F32 ? 4 : 2; }

/* ---- Vectors of 4 lanes, as GCC and Clang spell them for any machine ---- */

typedef float cpu_v4 __attribute__((vector_size(16)));
typedef uint32_t cpu_u4 __attribute__((vector_size(16)));
typedef int32_t cpu_i4 __attribute__((vector_size(16))); /* -1 or 0 a lane: what a comparison gives */
typedef uint16_t cpu_h4 __attribute__((vector_size(8)));

CPU_INLINE cpu_v4 cpu_get4(const float *p) {
    cpu_v4 v;
    memcpy(&v, p, sizeof v);
    return v;
}
CPU_INLINE void cpu_set4(float *p, cpu_v4 v) { memcpy(p, &v, sizeof v); }
CPU_INLINE cpu_v4 cpu_all4(float x) { return (cpu_v4){x, x, x, x}; }
CPU_INLINE cpu_v4 cpu_where4(cpu_i4 mask, cpu_v4 yes, cpu_v4 no) {
    return (cpu_v4)((mask & (cpu_i4)yes) | (~mask & (cpu_i4)no));
}
CPU_INLINE cpu_v4 cpu_max4(cpu_v4 a, cpu_v4 b) { return cpu_where4(a > b, a, b); }

/* exp, relative error below 3e-7; exactly 0 below -87 and exactly 1 at 0. x = n ln 2 + r with |r| <= ln 2 / 2, Taylor to
 * the 7th power in r (the 8th is 5e-9), n into the exponent. */
CPU_INLINE cpu_v4 cpu_exp4(cpu_v4 x) {
    cpu_v4 y = cpu_where4(x < -87.0f, cpu_all4(-87), x);
    y = cpu_where4(y > 88.0f, cpu_all4(88), y);
    cpu_v4 shifted = y * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the integer part lands in the low bits */
    cpu_v4 n = shifted - 12582912.0f;
    cpu_v4 r = y - n * 0.693359375f; /* ln 2 in two parts, the first with few bits */
    r = r - n * -2.12194440e-4f;
    cpu_v4 p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    cpu_u4 power = ((cpu_u4)shifted - 0x4B400000u + 127u) << 23;
    return cpu_where4(x < -87.0f, cpu_all4(0), p * (cpu_v4)power);
}

static void cpu_swiglu(float *gate, const float *up, int n) { /* gate = silu(gate) * up; n a multiple of 4 */
    for (int i = 0; i < n; i += 4) {
        cpu_v4 g = cpu_get4(gate + i);
        cpu_set4(gate + i, g / (1.0f + cpu_exp4(-g)) * cpu_get4(up + i));
    }
}

/* Merges one page of scores s[n] into a row's running softmax; only positions from <= j < to are seen. Leaves in s the
 * probabilities (relative to the new best) for the product with V, 0 where unseen. n and dp are multiples of 16. */
CPU_INLINE void cpu_soften(cpu_softmax *st, float *s, int n, int from, int to, int dp) {
    cpu_v4 lane[4];
    if (from >= to) {
        memset(s, 0, (size_t)n * sizeof *s);
        return;
    }
    for (int j = 0; j < from; j++) s[j] = -INFINITY;
    for (int j = to; j < n; j++) s[j] = -INFINITY;
    CPU_UNROLL for (int i = 0; i < 4; i++) lane[i] = cpu_get4(s + 4 * i);
    for (int j = 16; j < n; j += 16)
        CPU_UNROLL for (int i = 0; i < 4; i++) lane[i] = cpu_max4(lane[i], cpu_get4(s + j + 4 * i));
    cpu_v4 m = cpu_max4(cpu_max4(lane[0], lane[1]), cpu_max4(lane[2], lane[3]));
    float best = MAX(MAX(m[0], m[1]), MAX(m[2], m[3]));
    if (best > st->best) {
        cpu_v4 shrink = cpu_exp4(cpu_all4(st->best - best)); /* 0 at the first page, where st->best is -infinity */
        st->best = best;
        st->sum *= shrink[0];
        for (int j = 0; j < dp; j += 4) cpu_set4(st->acc + j, cpu_get4(st->acc + j) * shrink);
    }
    CPU_UNROLL for (int i = 0; i < 4; i++) lane[i] = cpu_all4(0);
    for (int j = 0; j < n; j += 16)
        CPU_UNROLL for (int i = 0; i < 4; i++) {
            cpu_v4 e = cpu_exp4(cpu_get4(s + j + 4 * i) - st->best);
            cpu_set4(s + j + 4 * i, e);
            lane[i] += e;
        }
    m = (lane[0] + lane[1]) + (lane[2] + lane[3]);
    st->sum += (m[0] + m[2]) + (m[1] + m[3]);
}

/* ---- What the tiles of all instruction sets share ---- */

/* Row j of a tile's weights; rows behind the last repeat it, their results are not written. */
CPU_INLINE const char *cpu_tile_row(const cpu_tile *t, int j) { return t->w + (size_t)MIN(j, t->n - 1) * t->w_step; }

/* A few rows of x read every weight once, from memory: asks for the same place in the next n rows, which come next, into
 * the second cache level; once per line of 64 bytes. Without it the units that add wait for memory and memory for them
 * (one row of x: reading alone 23 GB/s of one core, with the sums 16, with this 22; EPYC Zen 4, 2026-11). */
CPU_INLINE void cpu_tile_ahead(const cpu_tile *t, const char *const *w, const int n, toka_dtype type, int k) {
    const int line = type == TOKA_F32 ? 16 : 32; /* elements of 64 bytes */
    size_t ahead = t->w_step <= 32768 ? (size_t)n * t->w_step : 1024;
    if (t->ahead && k % line == 0)
        CPU_UNROLL for (int j = 0; j < n; j++) __builtin_prefetch(w[j] + (size_t)k * (64 / (size_t)line) + ahead, 0, 2);
}

/* ---- Portable kernels: 4 lanes ---- */

/* f16 to float32: exponent and mantissa moved into place are 2^112 too small, also where the number is subnormal. Infinity
 * and NaN get their exponent back. */
CPU_INLINE cpu_v4 cpu_halves_c(cpu_u4 h) {
    cpu_u4 rest = (h & 0x7FFF) << 13, top = (cpu_u4)(rest >= 0x0F800000) & 0x7F800000;
    return (cpu_v4)((cpu_u4)((cpu_v4)rest * 0x1p112f) | top | (h & 0x8000) << 16);
}

CPU_INLINE cpu_v4 cpu_load_c(const void *p, toka_dtype type, int k) {
    cpu_v4 v;
    cpu_h4 h;
    if (type == TOKA_F32) return memcpy(&v, (const char *)p + 4 * (size_t)k, sizeof v), v;
    memcpy(&h, (const char *)p + 2 * (size_t)k, sizeof h);
    cpu_u4 u = __builtin_convertvector(h, cpu_u4);
    return type == TOKA_F16 ? cpu_halves_c(u) : (cpu_v4)(u << 16);
}

CPU_INLINE void cpu_tile_body_c(const cpu_tile *t, const int m, const int n, const toka_dtype type) {
    cpu_v4 acc[2][8] = {0};
    const char *w[8];
    CPU_UNROLL for (int j = 0; j < n; j++) w[j] = cpu_tile_row(t, j);
    for (int k = 0; k < t->k; k += 4) {
        cpu_v4 a[2];
        cpu_tile_ahead(t, w, n, type, k);
        CPU_UNROLL for (int i = 0; i < m; i++) a[i] = cpu_load_c(t->x + (size_t)i * t->ldx, TOKA_F32, k);
        CPU_UNROLL for (int j = 0; j < n; j++) {
            cpu_v4 b = cpu_load_c(w[j], type, k);
            CPU_UNROLL for (int i = 0; i < m; i++) acc[i][j] += a[i] * b;
        }
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < t->n; j++) {
            float *y = t->y + (size_t)i * t->ldy + j, sum = (acc[i][j][0] + acc[i][j][2]) + (acc[i][j][1] + acc[i][j][3]);
            *y = t->add ? *y + sum : sum;
        }
}
CPU_INLINE void cpu_tile_c(const cpu_tile *t, const toka_dtype type) {
    if (t->m == 1 && t->n > 4) cpu_tile_body_c(t, 1, 8, type);
    else if (t->m == 1) cpu_tile_body_c(t, 1, 4, type);
    else cpu_tile_body_c(t, 2, 4, type);
}
static void cpu_tile_bf16_c(const cpu_tile *t) { cpu_tile_c(t, TOKA_BF16); }
static void cpu_tile_f16_c(const cpu_tile *t) { cpu_tile_c(t, TOKA_F16); }
static void cpu_tile_f32_c(const cpu_tile *t) { cpu_tile_c(t, TOKA_F32); }

static void cpu_unpack_c(float *to, const void *from, toka_dtype type, int n) {
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        cpu_v4 v = cpu_load_c(from, type, i);
        memcpy(to + i, &v, sizeof v);
    }
    for (; i < n; i++) to[i] = cpu_element(from, type, (size_t)i);
}

static void cpu_soften_c(cpu_softmax *st, float *s, int n, int from, int to, int dp) { cpu_soften(st, s, n, from, to, dp); }

static void cpu_outer_c(const cpu_outer *o) {
    for (int r = 0; r < o->rows; r++)
        for (int j = 0; j < o->n; j += 16) {
            const float *a = o->a + (size_t)r * o->lda, *b = o->b + j;
            cpu_v4 acc[4] = {0};
            float *c = o->c + (size_t)r * o->ldc + j;
            if (o->add) memcpy(acc, c, sizeof acc);
            for (int k = 0; k < o->k; k++, b += o->ldb)
                CPU_UNROLL for (int i = 0; i < 4; i++) acc[i] += a[k] * cpu_load_c(b, TOKA_F32, 4 * i);
            memcpy(c, acc, sizeof acc);
        }
}

#ifdef __x86_64__
#include <immintrin.h>

/* ---- AVX2 kernels: 8 lanes, 16 registers ---- */

#define CPU_AVX2 __attribute__((target("avx2,fma,f16c")))

CPU_AVX2 CPU_INLINE __m256 cpu_load_avx2(const void *p, toka_dtype type, int k) {
    if (type == TOKA_F32) return _mm256_loadu_ps((const float *)p + k);
    __m128i h = _mm_loadu_si128((const void *)((const char *)p + 2 * (size_t)k));
    if (type == TOKA_F16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* Sums the lanes of four vectors: lanes j and j+4 last, neighbours first. */
CPU_AVX2 CPU_INLINE __m128 cpu_sum4_avx2(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

/* Writes or adds four results, or the first n of them. */
CPU_AVX2 CPU_INLINE void cpu_put4_avx2(float *y, __m128 v, int n, bool add) {
    if (n >= 4) {
        _mm_storeu_ps(y, add ? _mm_add_ps(_mm_loadu_ps(y), v) : v);
        return;
    }
    float part[4];
    _mm_storeu_ps(part, v);
    for (int i = 0; i < n; i++) y[i] = add ? y[i] + part[i] : part[i];
}

CPU_AVX2 CPU_INLINE void cpu_tile_body_avx2(const cpu_tile *t, const int m, const int n, const toka_dtype type) {
    const char *w[8];
    __m256 acc[3][8], a[3];
    CPU_UNROLL for (int j = 0; j < n; j++) w[j] = cpu_tile_row(t, j);
    CPU_UNROLL for (int i = 0; i < m; i++)
        CPU_UNROLL for (int j = 0; j < n; j++) acc[i][j] = _mm256_setzero_ps();
    for (int k = 0; k < t->k; k += 8) {
        cpu_tile_ahead(t, w, n, type, k);
        CPU_UNROLL for (int i = 0; i < m; i++) a[i] = _mm256_loadu_ps(t->x + (size_t)i * t->ldx + k);
        CPU_UNROLL for (int j = 0; j < n; j++) { /* 12 sums, 3 of x and 1 weight: 16 registers */
            __m256 b = cpu_load_avx2(w[j], type, k);
            CPU_UNROLL for (int i = 0; i < m; i++) acc[i][j] = _mm256_fmadd_ps(a[i], b, acc[i][j]);
        }
    }
    CPU_UNROLL for (int i = 0; i < m; i++)
        CPU_UNROLL for (int j = 0; j < n; j += 4)
            cpu_put4_avx2(t->y + (size_t)i * t->ldy + j, cpu_sum4_avx2(acc[i][j], acc[i][j + 1], acc[i][j + 2],
                                                                       acc[i][j + 3]),
                          t->n - j, t->add);
}
CPU_AVX2 CPU_INLINE void cpu_tile_avx2(const cpu_tile *t, const toka_dtype type) {
    if (t->m == 1 && t->n > 4) cpu_tile_body_avx2(t, 1, 8, type);
    else if (t->m == 1) cpu_tile_body_avx2(t, 1, 4, type);
    else if (t->m == 2) cpu_tile_body_avx2(t, 2, 4, type);
    else cpu_tile_body_avx2(t, 3, 4, type);
}
CPU_AVX2 static void cpu_tile_bf16_avx2(const cpu_tile *t) { cpu_tile_avx2(t, TOKA_BF16); }
CPU_AVX2 static void cpu_tile_f16_avx2(const cpu_tile *t) { cpu_tile_avx2(t, TOKA_F16); }
CPU_AVX2 static void cpu_tile_f32_avx2(const cpu_tile *t) { cpu_tile_avx2(t, TOKA_F32); }

CPU_AVX2 static void cpu_unpack_avx2(float *to, const void *from, toka_dtype type, int n) {
    int i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, cpu_load_avx2(from, type, i));
    for (; i < n; i++) to[i] = cpu_element(from, type, (size_t)i);
}

/* rows x 16 results in registers over all of k */
CPU_AVX2 CPU_INLINE void cpu_outer_body_avx2(const cpu_outer *o, const int rows, int r, int j) {
    const float *a = o->a + (size_t)r * o->lda, *b = o->b + j;
    float *c = o->c + (size_t)r * o->ldc + j;
    __m256 lo[4], hi[4];
    CPU_UNROLL for (int i = 0; i < rows; i++) {
        lo[i] = o->add ? _mm256_loadu_ps(c + (size_t)i * o->ldc) : _mm256_setzero_ps();
        hi[i] = o->add ? _mm256_loadu_ps(c + (size_t)i * o->ldc + 8) : _mm256_setzero_ps();
    }
    for (int k = 0; k < o->k; k++, b += o->ldb) {
        __m256 y = _mm256_loadu_ps(b), z = _mm256_loadu_ps(b + 8);
        CPU_UNROLL for (int i = 0; i < rows; i++) {
            __m256 x = _mm256_broadcast_ss(a + (size_t)i * o->lda + k);
            lo[i] = _mm256_fmadd_ps(x, y, lo[i]);
            hi[i] = _mm256_fmadd_ps(x, z, hi[i]);
        }
    }
    CPU_UNROLL for (int i = 0; i < rows; i++) {
        _mm256_storeu_ps(c + (size_t)i * o->ldc, lo[i]);
        _mm256_storeu_ps(c + (size_t)i * o->ldc + 8, hi[i]);
    }
}
CPU_AVX2 static void cpu_soften_avx2(cpu_softmax *st, float *s, int n, int from, int to, int dp) {
    cpu_soften(st, s, n, from, to, dp);
}

CPU_AVX2 static void cpu_outer_avx2(const cpu_outer *o) {
    for (int j = 0; j < o->n; j += 16) {
        int r = 0;
        for (; r + 4 <= o->rows; r += 4) cpu_outer_body_avx2(o, 4, r, j);
        for (; r + 2 <= o->rows; r += 2) cpu_outer_body_avx2(o, 2, r, j);
        if (r < o->rows) cpu_outer_body_avx2(o, 1, r, j);
    }
}

/* ---- AVX-512 kernels: 16 lanes, 32 registers ---- */

#define CPU_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))

CPU_AVX512 CPU_INLINE __m512 cpu_load_avx512(const void *p, toka_dtype type, int k) {
    if (type == TOKA_F32) return _mm512_loadu_ps((const float *)p + k);
    __m256i h = _mm256_loadu_si256((const void *)((const char *)p + 2 * (size_t)k));
    if (type == TOKA_F16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

CPU_AVX512 CPU_INLINE __m256 cpu_fold_avx512(__m512 v) { /* lanes j and j+8 */
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}

CPU_AVX512 CPU_INLINE void cpu_tile_body_avx512(const cpu_tile *t, const int m, const int n, const toka_dtype type) {
    const char *w[8];
    __m512 acc[6][8], b[8];
    CPU_UNROLL for (int j = 0; j < n; j++) w[j] = cpu_tile_row(t, j);
    CPU_UNROLL for (int i = 0; i < m; i++)
        CPU_UNROLL for (int j = 0; j < n; j++) acc[i][j] = _mm512_setzero_ps();
    CPU_TWICE for (int k = 0; k < t->k; k += 16) {
        cpu_tile_ahead(t, w, n, type, k);
        CPU_UNROLL for (int j = 0; j < n; j++) b[j] = cpu_load_avx512(w[j], type, k);
        CPU_UNROLL for (int i = 0; i < m; i++) {
            __m512 a = _mm512_loadu_ps(t->x + (size_t)i * t->ldx + k);
            CPU_UNROLL for (int j = 0; j < n; j++) acc[i][j] = _mm512_fmadd_ps(a, b[j], acc[i][j]);
        }
    }
    CPU_UNROLL for (int i = 0; i < m; i++)
        CPU_UNROLL for (int j = 0; j < n; j += 4) {
            __m128 sum = cpu_sum4_avx2(cpu_fold_avx512(acc[i][j]), cpu_fold_avx512(acc[i][j + 1]),
                                       cpu_fold_avx512(acc[i][j + 2]),
                                       cpu_fold_avx512(acc[i][j + 3]));
            cpu_put4_avx2(t->y + (size_t)i * t->ldy + j, sum, t->n - j, t->add);
        }
}
CPU_AVX512 CPU_INLINE void cpu_tile_avx512(const cpu_tile *t, const toka_dtype type) {
    switch (t->m) {
    case 1:
        if (t->n > 4) cpu_tile_body_avx512(t, 1, 8, type);
        else cpu_tile_body_avx512(t, 1, 4, type);
        break;
    case 2: cpu_tile_body_avx512(t, 2, 4, type); break;
    case 3: cpu_tile_body_avx512(t, 3, 4, type); break;
    case 4: cpu_tile_body_avx512(t, 4, 4, type); break;
    case 5: cpu_tile_body_avx512(t, 5, 4, type); break;
    default: cpu_tile_body_avx512(t, 6, 4, type);
    }
}
CPU_AVX512 static void cpu_tile_bf16_avx512(const cpu_tile *t) { cpu_tile_avx512(t, TOKA_BF16); }
CPU_AVX512 static void cpu_tile_f16_avx512(const cpu_tile *t) { cpu_tile_avx512(t, TOKA_F16); }
CPU_AVX512 static void cpu_tile_f32_avx512(const cpu_tile *t) { cpu_tile_avx512(t, TOKA_F32); }

CPU_AVX512 static void cpu_unpack_avx512(float *to, const void *from, toka_dtype type, int n) {
    int i = 0;
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(to + i, cpu_load_avx512(from, type, i));
    for (; i < n; i++) to[i] = cpu_element(from, type, (size_t)i);
}

/* rows x 16 or 32 results in registers over all of k */
CPU_AVX512 CPU_INLINE void cpu_outer_body_avx512(const cpu_outer *o, const int rows, const bool two, int r, int j) {
    const float *a = o->a + (size_t)r * o->lda, *b = o->b + j;
    float *c = o->c + (size_t)r * o->ldc + j;
    __m512 lo[8], hi[8];
    CPU_UNROLL for (int i = 0; i < rows; i++) {
        lo[i] = o->add ? _mm512_loadu_ps(c + (size_t)i * o->ldc) : _mm512_setzero_ps();
        if (two) hi[i] = o->add ? _mm512_loadu_ps(c + (size_t)i * o->ldc + 16) : _mm512_setzero_ps();
    }
    for (int k = 0; k < o->k; k++, b += o->ldb) {
        __m512 y = _mm512_loadu_ps(b), z = two ? _mm512_loadu_ps(b + 16) : y;
        CPU_UNROLL for (int i = 0; i < rows; i++) {
            __m512 x = _mm512_set1_ps(a[(size_t)i * o->lda + k]);
            lo[i] = _mm512_fmadd_ps(x, y, lo[i]);
            if (two) hi[i] = _mm512_fmadd_ps(x, z, hi[i]);
        }
    }
    CPU_UNROLL for (int i = 0; i < rows; i++) {
        _mm512_storeu_ps(c + (size_t)i * o->ldc, lo[i]);
        if (two) _mm512_storeu_ps(c + (size_t)i * o->ldc + 16, hi[i]);
    }
}
CPU_AVX512 CPU_INLINE void cpu_outer_rows_avx512(const cpu_outer *o, const bool two, int j) {
    int r = 0;
    for (; r + 8 <= o->rows; r += 8) cpu_outer_body_avx512(o, 8, two, r, j);
    for (; r + 4 <= o->rows; r += 4) cpu_outer_body_avx512(o, 4, two, r, j);
    for (; r + 2 <= o->rows; r += 2) cpu_outer_body_avx512(o, 2, two, r, j);
    if (r < o->rows) cpu_outer_body_avx512(o, 1, two, r, j);
}
CPU_AVX512 static void cpu_soften_avx512(cpu_softmax *st, float *s, int n, int from, int to, int dp) {
    cpu_soften(st, s, n, from, to, dp);
}

CPU_AVX512 static void cpu_outer_avx512(const cpu_outer *o) {
    int j = 0;
    for (; j + 32 <= o->n; j += 32) cpu_outer_rows_avx512(o, true, j);
    if (j < o->n) cpu_outer_rows_avx512(o, false, j);
}

#endif

/* ---- The instruction sets, and the choice ---- */

static const cpu_kernels cpu_sets[] = {
    {"portable C", 2, 512, {cpu_tile_bf16_c, cpu_tile_f16_c, cpu_tile_f32_c}, cpu_unpack_c, cpu_outer_c, cpu_soften_c},
#ifdef __x86_64__
    {"AVX2", 3, 512, {cpu_tile_bf16_avx2, cpu_tile_f16_avx2, cpu_tile_f32_avx2}, cpu_unpack_avx2, cpu_outer_avx2,
     cpu_soften_avx2},
    {"AVX-512", 6, 1024, {cpu_tile_bf16_avx512, cpu_tile_f16_avx512, cpu_tile_f32_avx512}, cpu_unpack_avx512,
     cpu_outer_avx512, cpu_soften_avx512},
#endif
};

static int cpu_n_sets(void) { /* cpu_sets[0 .. this-1] run on this machine, the last is the fastest */
#ifdef __x86_64__
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); /* every such CPU converts f16 too */
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return 3;
    if (avx2) return 2;
#endif
    return 1;
}

/* ---- Threads ----
 * The thread that calls an op posts a round of numbered items; it and every thread of the pool that is awake take items
 * until none is left. A thread that the system has put aside simply does not join, and nobody waits for it; so more
 * threads than cores cost little. `state` holds: round number << 16 | open << 15 | threads inside. */

typedef void cpu_work(void *arg, int thread, int item);

typedef struct cpu_pool {
    int n;         /* threads with the caller */
    int64_t small; /* cost below which a round stays on the caller; tests set 0 */
    pthread_t *threads;
    _Atomic uint64_t state;
    atomic_int next; /* item to take */
    atomic_int sleepers;
    atomic_bool quit;
    int n_items; /* of the open round; these three are written while nobody is inside */
    cpu_work *work;
    void *arg;
    pthread_mutex_t lock; /* guards the wait on `wake` */
    pthread_cond_t wake;
    _Atomic uint64_t *progress; /* NULL, or counts the rounds for the other ranks to see */
} cpu_pool;

typedef struct cpu_worker {
    cpu_pool *pool;
    int thread;
} cpu_worker;

#define CPU_OPEN ((uint64_t)1 << 15)

static void cpu_pause(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

static void cpu_take_items(cpu_pool *p, int thread) {
    for (int i; (i = atomic_fetch_add(&p->next, 1)) < p->n_items;) p->work(p->arg, thread, i);
}

/* Waits until a round other than `seen` was posted; spins, then sleeps. */
static void cpu_await(cpu_pool *p, uint64_t seen) {
    for (int i = 0; i < CPU_SPIN; i++) {
        if (atomic_load(&p->state) >> 16 != seen || atomic_load(&p->quit)) return;
        cpu_pause();
    }
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->sleepers, 1); /* before looking again: the poster changes state first, then looks for sleepers */
    while (atomic_load(&p->state) >> 16 == seen && !atomic_load(&p->quit)) pthread_cond_wait(&p->wake, &p->lock);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->lock);
}

static void *cpu_thread(void *arg) {
    cpu_worker w = *(cpu_worker *)arg;
    cpu_pool *p = w.pool;
    free(arg);
    for (uint64_t seen = 0; !atomic_load(&p->quit);) {
        cpu_await(p, seen);
        uint64_t state = atomic_load(&p->state);
        seen = state >> 16;
        while (state & CPU_OPEN && !atomic_compare_exchange_weak(&p->state, &state, state + 1)) {}
        if (!(state & CPU_OPEN)) continue;
        seen = state >> 16;
        cpu_take_items(p, w.thread);
        atomic_fetch_sub(&p->state, 1);
    }
    return NULL;
}

/* Runs work(arg, thread, 0 .. n_items-1) and returns when all is done. cost: multiply-adds of it all, roughly. */
static void cpu_run(cpu_pool *p, cpu_work *work, void *arg, int n_items, int64_t cost) {
    if (p->progress) atomic_fetch_add(p->progress, 1);
    if (p->n == 1 || n_items <= 1 || cost < p->small) {
        for (int i = 0; i < n_items; i++) work(arg, 0, i);
        return;
    }
    p->work = work, p->arg = arg, p->n_items = n_items;
    atomic_store(&p->next, 0);
    uint64_t round = (atomic_load(&p->state) >> 16) + 1;
    atomic_store(&p->state, round << 16 | CPU_OPEN);
    if (atomic_load(&p->sleepers)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
    }
    cpu_take_items(p, 0);
    atomic_fetch_and(&p->state, ~CPU_OPEN);
    for (int spin = 0; atomic_load(&p->state) & (CPU_OPEN - 1); spin++)
        if (spin < CPU_SPIN) cpu_pause();
        else sched_yield();
}

static void cpu_pool_close(cpu_pool *p) {
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->quit, true);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->n - 1; i++) pthread_join(p->threads[i], NULL);
    free(p->threads);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
}

static int cpu_pool_open(cpu_pool *p, int n, toka_err *e) {
    *p = (cpu_pool){.n = 1, .small = CPU_SMALL, .threads = mem_zalloc((size_t)n * sizeof *p->threads)};
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    for (; p->n < n; p->n++) {
        cpu_worker *w = mem_alloc(sizeof *w);
        *w = (cpu_worker){p, p->n};
        int err = pthread_create(&p->threads[p->n - 1], NULL, cpu_thread, w);
        if (!err) continue;
        free(w);
        cpu_pool_close(p);
        return fail(e, TOKA_E_DEVICE, "CPU backend: cannot start thread %d of %d: %s", p->n + 1, n, strerror(err));
    }
    return 0;
}

/* ---- The device ---- */

typedef struct cpu_block { /* memory mapped zero; what is never touched costs nothing */
    void *p;
    size_t bytes;
} cpu_block;

struct toka_device {
    const toka_shape *shape;
    const toka_weights *weights;
    toka_device_options options;
    const cpu_kernels *kernels; /* tests set another one */
    cpu_pool pool;
    int chunk, out_chunk; /* tokens, rows of logits that scratch holds */
    int bp, dp;           /* B and D rounded up to 16 */
    int queries;          /* query rows of attention's scratch */
    int ldx, ldf;         /* floats from row to row of x and gate: past a multiple of 16, no power of two */
    size_t page_k, page_v; /* floats of a page of one layer: [K][D][Bp], [K][B][Dp] */
    float *kv_k, *kv_v;    /* [L][n_pages][K][D][Bp], [L][n_pages][K][B][Dp] */
    float *x;              /* [chunk][ldx] inputs of products; each row has zeros up to the next multiple of 16 */
    float *k, *v;          /* [chunk][K*D] */
    float *gate, *up;      /* [chunk][ldf]; columns behind F stay zero */
    float *logits;         /* [out_chunk][V_all]; with tp ranks the stage's, in which each fills its V columns */
    int32_t *last;         /* [n_slots] the token drawn last for each slot */
    float *vec;            /* norm weights and biases of the running op in float32, [6][max(E, H*D)] */
    float *scratch;        /* per thread [scratch_n]: a panel of weights, or attention's rows */
    size_t scratch_n;
    cpu_block blocks[32]; /* all of the above and what alloc handed out */
    int n_blocks;
    size_t n_bytes; /* of all blocks */
    toka_err error; /* the first failure; code 0: none */
    int fault_in, stall_in; /* debugging: so many steps from now one fails, or never returns; 0: none */
    char about[96];
    toka_group *group; /* NULL: alone */
    struct cpu_rank *rank; /* this one's place in it */
    struct cpu_stage *stage;
};

static void *cpu_zalloc(toka_device *d, size_t n, size_t size) { /* n * size bytes of zeros; NULL latches the failure */
    size_t bytes, ram = (size_t)os_ram_bytes(), left = ram - MIN(d->n_bytes, ram);
    void *p = MAP_FAILED;
    /* what is mapped and never touched costs nothing, but what the machine could never hold is a mistake */
    if (!__builtin_mul_overflow(n, size, &bytes) && bytes <= left && d->n_blocks < COUNT(d->blocks))
        p = mmap(NULL, MAX(bytes, (size_t)1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        if (!d->error.code) fail(&d->error, TOKA_E_MEMORY, "CPU backend: no memory for %zu x %zu bytes beside %zu MB; the machine has %zu MB", n,
                                     size, d->n_bytes >> 20, ram >> 20);
        return NULL;
    }
    d->blocks[d->n_blocks++] = (cpu_block){p, MAX(bytes, (size_t)1)};
    d->n_bytes += bytes;
    return p;
}

static float *cpu_at(toka_dev a) { return (float *)(uintptr_t)a.at; }

/* ---- Ranks ----
 * A group is the ranks of one model: stages x tp ranks, each a device with a thread of its own. All that they share is here. All
 * waiting is for counters that only rise, so nobody has to reset one and nobody can mistake a round for another:
 *     stage.came, stage.left   a meeting of the tp ranks is the n-th when came reaches n * tp_size; in it each may use the
 *                              memory of the others, until left reaches n * tp_size
 *     link.sent, link.taken    messages put into and taken out of the ring from a rank to the next stage's
 *     drawn                    number of the last step whose drawn ids are in last[]
 *
 * A group that is broken stays so: nobody comes to a meeting any more, waits end, ops return at once. Counts are raised and the
 * group is broken under one lock, so all ranks agree which meeting was the last to come about, and whoever is in it stays until
 * all have left: nobody closes a device whose memory another reads.
 *
 * last[] is one table for all stages. A token of slot q that step k drew is read by a later step j; the next draw for q that
 * could overwrite it is of step j or later, and by then all first ranks have embedded j (the step came through them). */

enum cpu_wait { CPU_RUNS, CPU_WAITS_STAGE, CPU_WAITS_BEFORE, CPU_WAITS_NEXT, CPU_WAITS_DRAWN }; /* whom a rank waits for */

typedef struct cpu_rank { /* what others look at when nobody gets on */
    bool taken;                 /* a device has this place, or had it */
    const char *_Atomic op;     /* that it is in, or was in last; NULL: none yet */
    atomic_int waits;           /* enum cpu_wait */
    _Atomic int64_t n_meetings; /* that it came to */
} cpu_rank;

typedef struct cpu_stage {
    _Atomic int64_t came, left;
    float *x[CPU_RANKS]; /* what each tp rank brought to the meeting, [rows][E] */
    float *logits;       /* [out_chunk][V_all], in the last stage with tp ranks */
    toka_pick *picks;    /* [out_chunk] */
    float *wanted;       /* where the meeting's raw logits go, or NULL */
} cpu_stage;

typedef struct cpu_link { /* from a rank to the same tp rank of the next stage */
    _Atomic int64_t sent, taken;
    float *ring; /* [CPU_LINK][max_tokens][E] */
    int rows[CPU_LINK];
} cpu_link;

struct toka_group {
    int tp_size, pp_size;
    double patience;           /* CPU_PATIENCE; tests have less */
    cpu_rank ranks[CPU_RANKS]; /* [pp][tp] */
    cpu_link links[CPU_RANKS]; /* [pp][tp] */
    cpu_stage stages[CPU_RANKS];
    int32_t *last;             /* [n_slots] with stages: the token drawn last for each slot */
    int n_slots;
    _Atomic int64_t drawn;
    _Atomic uint64_t progress; /* changes while anybody gets on */
    atomic_bool broken;
    pthread_mutex_t lock;      /* guards what is set at open, rises of the counts, broken, error, sleepers */
    pthread_cond_t changed;
    int sleepers;
    toka_err error;            /* why it is broken; code 0: it was told to end */
};

static void cpu_group_close(toka_group *g) {
    if (!g) return;
    for (int i = 0; i < g->tp_size * g->pp_size; i++) free(g->links[i].ring);
    for (int i = 0; i < g->pp_size; i++) free(g->stages[i].logits), free(g->stages[i].picks);
    free(g->last);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

static int cpu_group_open(toka_group **out, int tp_size, int pp_size, toka_err *e) {
    if (tp_size < 1 || pp_size < 1 || tp_size > CPU_RANKS / pp_size)
        return fail(e, TOKA_E_USE, "CPU backend: %d stages of %d tensor ranks, expected 1 to %d ranks", pp_size, tp_size,
                    CPU_RANKS);
    toka_group *g = *out = mem_zalloc(sizeof *g);
    pthread_condattr_t monotonic;
    g->tp_size = tp_size, g->pp_size = pp_size, g->patience = CPU_PATIENCE;
    pthread_mutex_init(&g->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&g->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return 0;
}

static void cpu_group_break(toka_group *g) { /* with the lock held */
    atomic_store(&g->broken, true);
    pthread_cond_broadcast(&g->changed);
}

static void cpu_group_abort(toka_group *g) {
    pthread_mutex_lock(&g->lock);
    cpu_group_break(g);
    pthread_mutex_unlock(&g->lock);
}

static void cpu_rank_name(const toka_group *g, int i, char z[64]) {
    snprintf(z, 64, "rank %d (stage %d, tensor rank %d)", i, i / g->tp_size, i % g->tp_size);
}

/* Whom rank i waits for; itself if that is none in particular. */
static int cpu_rank_ahead(toka_group *g, int i) {
    const int tp = g->tp_size, first = i / tp * tp;
    switch (atomic_load(&g->ranks[i].waits)) {
    case CPU_WAITS_BEFORE: return i - tp;
    case CPU_WAITS_NEXT: return i + tp;
    case CPU_WAITS_DRAWN: return (g->pp_size - 1) * tp;
    }
    for (int q = first; q < first + tp; q++)
        if (atomic_load(&g->ranks[q].n_meetings) < atomic_load(&g->ranks[i].n_meetings)) return q;
    return i;
}

/* Nobody got on for too long. To blame is who waits for nobody, at the end of the chain of those who wait. With the lock held. */
static void cpu_group_blame(toka_device *d) {
    toka_group *g = d->group;
    const int me = (int)(d->rank - g->ranks), n = g->tp_size * g->pp_size;
    int who = me;
    char name[64], mine[64];
    for (int i = 0; i < n && atomic_load(&g->ranks[who].waits); i++) who = cpu_rank_ahead(g, who);
    const char *op = atomic_load(&g->ranks[who].op), *my_op = atomic_load(&d->rank->op);
    cpu_rank_name(g, who, name), cpu_rank_name(g, me, mine);
    if (atomic_load(&g->ranks[who].waits))
        fail(&g->error, TOKA_E_DEVICE, "CPU backend: all ranks have waited for each other for %g s, %s in %s", g->patience, mine,
             my_op);
    else
        fail(&g->error, TOKA_E_DEVICE, "CPU backend: %s has not moved for %g s, last seen in %s; %s waits for it in %s", name,
             g->patience, op ? op : "no op", mine, my_op);
    cpu_group_break(g);
}

/* Sleeps until something changed or a part of the patience is over; `quiet` adds up seconds without progress. They are counted in
 * naps, not by the clock: a process that was stopped for a while has lost no patience. With the lock held. */
static void cpu_group_nap(toka_group *g, uint64_t *seen, double *quiet) {
    const double nap = MIN(0.1, g->patience / 8), until = os_now() + nap;
    struct timespec t = {(time_t)until, (long)((until - floor(until)) * 1e9)};
    g->sleepers++;
    bool slept = pthread_cond_timedwait(&g->changed, &g->lock, &t) == ETIMEDOUT;
    g->sleepers--;
    uint64_t now = atomic_load(&g->progress);
    *quiet = now == *seen ? *quiet + (slept ? nap : 0) : 0;
    *seen = now;
}

/* Waits until *count has come to `want`. False: it has not, and the group is broken. */
static bool cpu_group_wait(toka_device *d, enum cpu_wait whom, _Atomic int64_t *count, int64_t want) {
    toka_group *g = d->group;
    for (int i = 0; i < CPU_SPIN && atomic_load(count) < want && !atomic_load(&g->broken); i++) cpu_pause();
    if (atomic_load(count) >= want) return true;
    double quiet = 0;
    uint64_t seen = 0;
    pthread_mutex_lock(&g->lock);
    atomic_store(&d->rank->waits, whom);
    while (atomic_load(count) < want && !atomic_load(&g->broken)) {
        cpu_group_nap(g, &seen, &quiet);
        if (quiet >= g->patience && atomic_load(count) < want) cpu_group_blame(d);
    }
    atomic_store(&d->rank->waits, CPU_RUNS);
    bool there = atomic_load(count) >= want;
    pthread_mutex_unlock(&g->lock);
    return there;
}

/* Raises a count, unless the group is broken and it is not one that must rise all the same. */
static void cpu_group_raise(toka_group *g, _Atomic int64_t *count, int64_t by, bool always) {
    pthread_mutex_lock(&g->lock);
    if (always || !atomic_load(&g->broken)) {
        atomic_fetch_add(count, by), atomic_fetch_add(&g->progress, 1);
        if (g->sleepers) pthread_cond_broadcast(&g->changed);
    }
    pthread_mutex_unlock(&g->lock);
}

/* Every op begins here. False: the group is broken and there is nothing to do. */
static bool cpu_enter(toka_device *d, const char *op) {
    if (!d->group) return true;
    if (atomic_load(&d->group->broken)) return false;
    atomic_store(&d->rank->op, op);
    atomic_fetch_add(&d->group->progress, 1);
    return true;
}

/* A meeting of the stage's tp ranks. True: all are in it, and all will come to cpu_meet_end. */
static bool cpu_meet(toka_device *d) {
    const int64_t n = atomic_fetch_add(&d->rank->n_meetings, 1) + 1;
    cpu_group_raise(d->group, &d->stage->came, 1, false);
    return cpu_group_wait(d, CPU_WAITS_STAGE, &d->stage->came, n * d->group->tp_size);
}

/* Nobody in a meeting waits for anything but its end, so this ends also where the group is broken. */
static void cpu_meet_end(toka_device *d) {
    const int64_t all = atomic_load(&d->rank->n_meetings) * d->group->tp_size;
    cpu_group_raise(d->group, &d->stage->left, 1, true);
    while (!cpu_group_wait(d, CPU_WAITS_STAGE, &d->stage->left, all)) sched_yield();
}

/* What the devices of the group share is taken by the first that needs it. With the lock held. */
static int cpu_group_memory(toka_device *d, toka_err *e) {
    toka_group *g = d->group;
    const toka_device_options *o = &d->options;
    const bool last = o->pp_rank == g->pp_size - 1;
    bool there = true;
    if (!last) {
        cpu_link *l = &g->links[d->rank - g->ranks];
        there = (l->ring = mem_try((size_t)CPU_LINK * (size_t)o->max_tokens, (size_t)d->shape->E * sizeof *l->ring)) != NULL;
    }
    if (last && g->tp_size > 1) {
        cpu_stage *st = d->stage;
        if (!st->logits) st->logits = mem_try((size_t)d->out_chunk, (size_t)d->shape->V_all * sizeof *st->logits);
        if (!st->picks) st->picks = mem_try((size_t)d->out_chunk, sizeof *st->picks);
        there = there && st->logits && st->picks;
        d->logits = st->logits;
    }
    if (g->pp_size > 1) {
        if (!g->last) g->last = mem_try((size_t)o->n_slots, sizeof *g->last), g->n_slots = o->n_slots;
        there = there && g->last;
        d->last = g->last;
    }
    return there ? 0 : fail(e, TOKA_E_MEMORY, "CPU backend: no memory for what the ranks share");
}

/* Takes the device's place in its group. */
static int cpu_group_join(toka_device *d, toka_err *e) {
    toka_group *g = d->group;
    const int i = d->options.pp_rank * g->tp_size + d->options.tp_rank;
    int code;
    char name[64];
    pthread_mutex_lock(&g->lock);
    d->rank = &g->ranks[i], d->stage = &g->stages[d->options.pp_rank];
    cpu_rank_name(g, i, name);
    if (d->rank->taken) code = fail(e, TOKA_E_USE, "CPU backend: %s has been there before", name);
    else if (g->last && g->n_slots != d->options.n_slots)
        code = fail(e, TOKA_E_USE, "CPU backend: %s has %d slots, expected %d as another rank", name, d->options.n_slots,
                    g->n_slots);
    else code = cpu_group_memory(d, e);
    if (!code) d->rank->taken = true;
    pthread_mutex_unlock(&g->lock);
    return code;
}

/* ---- Ops: all_reduce, send, receive ---- */

typedef struct cpu_reduce {
    float **x; /* [tp] each rank's [rows][E] */
    int tp_size, E;
    int from, to; /* this rank sums these columns of every row */
} cpu_reduce;

static void cpu_reduce_item(void *arg, int thread, int row) {
    const cpu_reduce *r = arg;
    (void)thread;
    for (int c = r->from; c < r->to; c += 64) {
        float sum[64];
        const size_t at = (size_t)row * (size_t)r->E + (size_t)c, n = (size_t)MIN(64, r->to - c);
        memcpy(sum, r->x[0] + at, n * sizeof *sum);
        for (int q = 1; q < r->tp_size; q++)
            for (size_t i = 0; i < n; i++) sum[i] += r->x[q][at + i];
        for (int q = 0; q < r->tp_size; q++) memcpy(r->x[q] + at, sum, n * sizeof *sum);
    }
}

static void cpu_all_reduce(toka_device *d, toka_dev x, int rows) {
    toka_group *g = d->group;
    if (!g || g->tp_size == 1 || !cpu_enter(d, "all_reduce")) return;
    const int E = d->shape->E, r = d->options.tp_rank;
    d->stage->x[r] = cpu_at(x);
    if (!cpu_meet(d)) return;
    cpu_reduce job = {d->stage->x, g->tp_size, E, (int)((int64_t)E * r / g->tp_size), (int)((int64_t)E * (r + 1) / g->tp_size)};
    cpu_run(&d->pool, cpu_reduce_item, &job, rows, (int64_t)rows * E);
    cpu_meet_end(d);
}

static float *cpu_link_at(const toka_device *d, cpu_link *l, int64_t i) { /* place of message i in the ring */
    return l->ring + (size_t)(i % CPU_LINK) * (size_t)d->options.max_tokens * (size_t)d->shape->E;
}

static void cpu_send(toka_device *d, toka_dev x, int rows) {
    if (!cpu_enter(d, "send")) return;
    cpu_link *l = &d->group->links[d->rank - d->group->ranks];
    const int64_t i = atomic_load(&l->sent);
    if (!cpu_group_wait(d, CPU_WAITS_NEXT, &l->taken, i + 1 - CPU_LINK)) return;
    memcpy(cpu_link_at(d, l, i), cpu_at(x), (size_t)rows * (size_t)d->shape->E * sizeof(float));
    l->rows[i % CPU_LINK] = rows;
    cpu_group_raise(d->group, &l->sent, 1, false);
}

static void cpu_receive(toka_device *d, toka_dev x, int rows) {
    if (!cpu_enter(d, "receive")) return;
    cpu_link *l = &d->group->links[d->rank - d->group->ranks - d->group->tp_size];
    const int64_t i = atomic_load(&l->taken);
    if (!cpu_group_wait(d, CPU_WAITS_BEFORE, &l->sent, i + 1)) return;
    assert(l->rows[i % CPU_LINK] == rows);
    memcpy(cpu_at(x), cpu_link_at(d, l, i), (size_t)rows * (size_t)d->shape->E * sizeof(float));
    cpu_group_raise(d->group, &l->taken, 1, false);
}

/* A vector weight in float32 in place `i` of the op's scratch; NULL if the tensor is absent. */
static const float *cpu_vec(toka_device *d, int i, const toka_tensor *t) {
    float *to = d->vec + (size_t)i * (size_t)MAX(d->shape->E, d->shape->H * d->shape->D);
    if (!t->rows) return NULL;
    d->kernels->unpack(to, t->data, t->dtype, t->cols);
    return to;
}

/* ---- Products with weights ---- */

/* y[j][t][n] (+)= x[t] . w[j][n] for up to three weights that take the same x. */
typedef struct cpu_product {
    toka_device *d;
    const float *x; /* [T][ldx], zeros behind a row up to a multiple of 16 */
    size_t ldx;
    int T, n_w;
    const toka_tensor *w[3];
    float *y[3];
    size_t ldy[3];
    bool add;
    int columns; /* of y per item; the items of the weights follow each other */
} cpu_product;

/* Columns n0 .. n1-1 straight from the weight as it lies in memory; needs cols % 16 == 0. */
static void cpu_product_direct(const cpu_product *p, int j, int n0, int n1) {
    const toka_tensor *w = p->w[j];
    const cpu_kernels *kn = p->d->kernels;
    size_t size = cpu_dtype_bytes(w->dtype), row = size * (size_t)w->stride;
    cpu_tile t = {.ldx = p->ldx, .w_step = row, .ldy = p->ldy[j]};
    int columns = p->T == 1 ? 8 : 4;
    for (int n = n0; n < n1; n += columns)
        for (int k = 0; k < w->cols; k += kn->block)
            for (int m = 0; m < p->T; m += kn->rows) {
                t.x = p->x + (size_t)m * p->ldx + k;
                t.w = (const char *)w->data + (size_t)n * row + size * (size_t)k;
                t.y = p->y[j] + (size_t)m * p->ldy[j] + n;
                t.m = MIN(kn->rows, p->T - m), t.n = MIN(columns, n1 - n), t.k = MIN(kn->block, w->cols - k);
                t.add = p->add || k, t.ahead = m == 0;
                kn->tile[w->dtype](&t);
            }
}

/* The same through a panel: [n1-n0][one block of k] unpacked to float32, then all rows of x over it. A tile of x (6 rows
 * of a block) stays in the first cache level while the panel goes by from the second. */
static void cpu_product_panel(const cpu_product *p, int j, int n0, int n1, float *panel) {
    const toka_tensor *w = p->w[j];
    const cpu_kernels *kn = p->d->kernels;
    size_t size = cpu_dtype_bytes(w->dtype);
    cpu_tile t = {.ldx = p->ldx, .w_step = CPU_PANEL_LD * sizeof *panel, .ldy = p->ldy[j]};
    for (int k = 0; k < w->cols; k += kn->block) {
        int block = MIN(kn->block, w->cols - k);
        t.k = cpu_up16(block), t.add = p->add || k;
        for (int n = n0; n < n1; n++) {
            float *to = panel + (size_t)(n - n0) * CPU_PANEL_LD;
            kn->unpack(to, (const char *)w->data + size * ((size_t)n * (size_t)w->stride + (size_t)k), w->dtype, block);
            memset(to + block, 0, (size_t)(t.k - block) * sizeof *to);
        }
        for (int m = 0; m < p->T; m += kn->rows)
            for (int n = n0; n < n1; n += 4) {
                t.x = p->x + (size_t)m * p->ldx + k;
                t.w = (const char *)(panel + (size_t)(n - n0) * CPU_PANEL_LD);
                t.y = p->y[j] + (size_t)m * p->ldy[j] + n;
                t.m = MIN(kn->rows, p->T - m), t.n = MIN(4, n1 - n);
                kn->tile[TOKA_F32](&t);
            }
    }
}

static void cpu_product_item(void *arg, int thread, int item) {
    const cpu_product *p = arg;
    int j = 0, items;
    for (; item >= (items = (p->w[j]->rows + p->columns - 1) / p->columns); j++) item -= items;
    int n0 = item * p->columns, n1 = MIN(n0 + p->columns, p->w[j]->rows);
    if (p->T <= CPU_DIRECT && p->w[j]->cols % 16 == 0) cpu_product_direct(p, j, n0, n1);
    else cpu_product_panel(p, j, n0, n1, p->d->scratch + (size_t)thread * p->d->scratch_n);
}

static void cpu_product_run(cpu_product *p) {
    int rows = 0, items = 0;
    for (int j = 0; j < p->n_w; j++) rows += p->w[j]->rows;
    int share = rows / (8 * p->d->pool.n) & ~3; /* a few items a thread, so that all end at about the same time */
    p->columns = MIN(MAX(share, 8), CPU_PANEL);
    for (int j = 0; j < p->n_w; j++) items += (p->w[j]->rows + p->columns - 1) / p->columns;
    cpu_run(&p->d->pool, cpu_product_item, p, items, (int64_t)p->T * rows * p->w[0]->cols);
}

/* ---- Norms ---- */

/* y = x * rsqrt(mean(x^2) + eps) * w; zeros behind y up to a multiple of 16 if pad. y may be x. */
static void cpu_rmsnorm(float *y, const float *x, const float *w, int n, float eps, bool pad) {
    float lane[16] = {0}, sum = 0;
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) lane[j] += x[i + j] * x[i + j];
    for (; i < n; i++) lane[i % 16] += x[i] * x[i];
    for (int j = 0; j < 16; j++) sum += lane[j];
    float scale = 1.0f / sqrtf(sum / (float)n + eps);
    for (i = 0; i < n; i++) y[i] = x[i] * scale * w[i];
    if (pad) memset(y + n, 0, (size_t)(cpu_up16(n) - n) * sizeof *y);
}

typedef struct cpu_norm { /* rows to d->x, normed, or just copied where w is NULL */
    toka_device *d;
    const float *from, *w;
    const toka_out_row *rows; /* NULL: row t is row t */
    int width;
} cpu_norm;

static void cpu_norm_item(void *arg, int thread, int t) {
    const cpu_norm *n = arg;
    (void)thread;
    const float *from = n->from + (size_t)(n->rows ? n->rows[t].row : t) * (size_t)n->width;
    float *to = n->d->x + (size_t)t * (size_t)n->d->ldx;
    if (n->w) {
        cpu_rmsnorm(to, from, n->w, n->width, n->d->shape->eps, true);
        return;
    }
    memcpy(to, from, (size_t)n->width * sizeof *to);
    memset(to + n->width, 0, (size_t)(cpu_up16(n->width) - n->width) * sizeof *to);
}
static void cpu_norm_run(cpu_norm n, int rows) { cpu_run(&n.d->pool, cpu_norm_item, &n, rows, (int64_t)rows * n.width); }

/* ---- Op: embed ---- */

static int cpu_debug(const char *name) {
    const char *value = getenv(name);
    return value ? atoi(value) : 0;
}

/* A device that breaks, for the tests of what happens then. */
static void cpu_break(toka_device *d) {
    if (d->fault_in && !--d->fault_in) fail(&d->error, TOKA_E_DEVICE, "CPU backend: a step failed, as TOKA_DEBUG_FAULT wants it");
    if (d->stall_in && !--d->stall_in)
        for (;;) pause();
}

/* Begins the step. */
static void cpu_embed(toka_device *d, const toka_step *s, toka_dev x) {
    const toka_tensor *w = &d->weights->embed;
    size_t E = (size_t)d->shape->E, row = (size_t)w->stride * cpu_dtype_bytes(w->dtype);
    assert(s->T <= d->options.max_tokens);
    if (!cpu_enter(d, "embed")) return;
    if (d->group && d->group->pp_size > 1 && !cpu_group_wait(d, CPU_WAITS_DRAWN, &d->group->drawn, s->needs)) return;
    cpu_break(d);
    for (int t = 0; t < s->T; t++) {
        assert(s->ids[t] >= -d->options.n_slots);
        int32_t id = s->ids[t] >= 0 ? s->ids[t] : d->last[-1 - s->ids[t]];
        float *to = cpu_at(x) + (size_t)t * E;
        assert(id >= 0 && id < d->shape->V_all);
        id -= d->shape->v0;
        if (id >= 0 && id < w->rows) d->kernels->unpack(to, (const char *)w->data + (size_t)id * row, w->dtype, (int)E);
        else memset(to, 0, E * sizeof *to);
    }
}

/* ---- Op: norm_qkv_rope_kv ---- */

typedef struct cpu_rope { /* behind the products: bias, norm over heads, rotation, K and V into their pages */
    toka_device *d;
    const toka_step *s;
    int layer, t0; /* first token of the chunk */
    float *q;      /* [chunk][H][D] */
    const float *q_bias, *k_bias, *v_bias, *q_norm, *k_norm; /* NULL: none */
} cpu_rope;

/* One head: bias, norm, then the pair (i, i + D/2) turned by position * rope_freq[i]. */
static void cpu_rope_head(const toka_shape *sh, float *x, const float *bias, const float *norm, const float *cosine,
                          const float *sine) {
    int half = sh->D / 2;
    if (bias)
        for (int i = 0; i < sh->D; i++) x[i] += bias[i];
    if (norm) cpu_rmsnorm(x, x, norm, sh->D, sh->eps, false);
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

static void cpu_rope_item(void *arg, int thread, int i) {
    const cpu_rope *r = arg;
    const toka_device *d = r->d;
    const toka_shape *sh = d->shape;
    (void)thread;
    size_t D = (size_t)sh->D, B = (size_t)sh->B, K = (size_t)sh->K, t = (size_t)i;
    float cosine[CPU_HEAD / 2], sine[CPU_HEAD / 2];
    for (int f = 0; f < sh->D / 2; f++) {
        float angle = (float)r->s->pos[r->t0 + i] * sh->rope_freq[f];
        cosine[f] = cosf(angle) * sh->rope_scale, sine[f] = sinf(angle) * sh->rope_scale;
    }
    for (size_t h = 0; h < (size_t)sh->H; h++)
        cpu_rope_head(sh, r->q + (t * (size_t)sh->H + h) * D, r->q_bias ? r->q_bias + h * D : NULL, r->q_norm, cosine,
                      sine);
    int slot = r->s->slot[r->t0 + i];
    assert(slot >= 0 && slot / sh->B < d->options.n_pages);
    size_t page = (size_t)r->layer * (size_t)d->options.n_pages + (size_t)slot / B, at = (size_t)slot % B;
    for (size_t h = 0; h < K; h++) {
        float *k = d->k + (t * K + h) * D, *v = d->v + (t * K + h) * D;
        cpu_rope_head(sh, k, r->k_bias ? r->k_bias + h * D : NULL, r->k_norm, cosine, sine);
        float *to_k = d->kv_k + page * d->page_k + h * D * (size_t)d->bp + at;
        float *to_v = d->kv_v + page * d->page_v + (h * B + at) * (size_t)d->dp;
        for (size_t j = 0; j < D; j++) {
            to_k[j * (size_t)d->bp] = k[j];
            to_v[j] = v[j] + (r->v_bias ? r->v_bias[h * D + j] : 0);
        }
    }
}

static void cpu_norm_qkv_rope_kv(toka_device *d, const toka_step *s, int layer, toka_dev x, toka_dev q) {
    const toka_shape *sh = d->shape;
    const toka_layer *l = &d->weights->layers[layer];
    size_t E = (size_t)sh->E, HD = (size_t)(sh->H * sh->D), KD = (size_t)(sh->K * sh->D);
    if (!cpu_enter(d, "norm_qkv_rope_kv")) return;
    const float *norm = cpu_vec(d, 0, &l->attn_norm);
    cpu_rope r = {.d = d, .s = s, .layer = layer, .q_bias = cpu_vec(d, 1, &l->q_bias), .k_bias = cpu_vec(d, 2, &l->k_bias),
                  .v_bias = cpu_vec(d, 3, &l->v_bias), .q_norm = cpu_vec(d, 4, &l->q_norm),
                  .k_norm = cpu_vec(d, 5, &l->k_norm)};
    for (int t0 = 0; t0 < s->T; t0 += d->chunk) {
        int n = MIN(d->chunk, s->T - t0);
        r.t0 = t0, r.q = cpu_at(q) + (size_t)t0 * HD;
        cpu_norm_run((cpu_norm){d, cpu_at(x) + (size_t)t0 * E, norm, NULL, sh->E}, n);
        cpu_product p = {.d = d, .x = d->x, .ldx = (size_t)d->ldx, .T = n, .n_w = 3, .w = {&l->q, &l->k, &l->v},
                         .y = {r.q, d->k, d->v}, .ldy = {HD, KD, KD}};
        cpu_product_run(&p);
        cpu_run(&d->pool, cpu_rope_item, &r, n, (int64_t)n * (int64_t)(HD + 2 * KD) * 4);
    }
}

/* ---- Op: attention ---- */

typedef struct cpu_attention_job {
    toka_device *d;
    const toka_step *s;
    int layer, tokens, heads; /* tokens and kv heads of an item */
    const float *q;
    float *o;
} cpu_attention_job;

/* Query rows that pass over K and V together: tokens r0 .. r1-1, and for each the G heads of kv head h. All in thread
 * scratch. */
typedef struct cpu_rows {
    int r0, r1, h, G;
    float *q;         /* [r1-r0][G][D], times 1/sqrt(D) */
    float *scores;    /* [(r1-r0)*G][Bp] */
    cpu_softmax *st;  /* [(r1-r0)*G] */
    float *acc;       /* [(r1-r0)*G][Dp] */
} cpu_rows;

/* Tokens a .. b-1 of the rows see the page whose first kv position is kv, as far as `end`. */
static void cpu_attend_page(const cpu_attention_job *a, cpu_rows *w, int t0, int t1, int32_t page, int kv, int end) {
    const toka_device *d = a->d;
    const toka_shape *sh = d->shape;
    int window = d->weights->layers[a->layer].window, n = MIN(sh->B, end - kv);
    size_t D = (size_t)sh->D, at = (size_t)a->layer * (size_t)d->options.n_pages + (size_t)page;
    size_t first = (size_t)((t0 - w->r0) * w->G);
    assert(page >= 0 && page < d->options.n_pages);
    cpu_outer qk = {.a = w->q + first * D, .lda = D, .b = d->kv_k + at * d->page_k + (size_t)w->h * D * (size_t)d->bp,
                    .ldb = (size_t)d->bp, .c = w->scores, .ldc = (size_t)d->bp, .rows = (t1 - t0) * w->G, .k = sh->D,
                    .n = d->bp};
    d->kernels->outer(&qk);
    for (int t = t0; t < t1; t++) {
        int pos = a->s->pos[t], to = MIN(n, pos + 1 - kv), from = window ? MAX(0, pos - window + 1 - kv) : 0;
        for (int g = 0; g < w->G; g++)
            d->kernels->soften(&w->st[(t - w->r0) * w->G + g], w->scores + (size_t)((t - t0) * w->G + g) * (size_t)d->bp,
                               d->bp,
                               from, to, d->dp);
    }
    cpu_outer pv = {.a = w->scores, .lda = (size_t)d->bp, .ldb = (size_t)d->dp,
                    .b = d->kv_v + at * d->page_v + (size_t)(w->h * sh->B) * (size_t)d->dp,
                    .c = w->acc + first * (size_t)d->dp,
                    .ldc = (size_t)d->dp, .rows = qk.rows, .k = n, .n = d->dp, .add = true};
    d->kernels->outer(&pv);
}

static void cpu_attend_span(const cpu_attention_job *a, cpu_rows *w, const toka_span *sp) {
    int t0 = MAX(w->r0, sp->row0), t1 = MIN(w->r1, sp->row0 + sp->n_rows), B = a->d->shape->B;
    int window = a->d->weights->layers[a->layer].window, high = -1, low = INT_MAX;
    for (int t = t0; t < t1; t++) high = MAX(high, a->s->pos[t]), low = MIN(low, a->s->pos[t]);
    int end = MIN(sp->kv0 + sp->n_kv, high + 1), kv = sp->kv0;
    /* pages that no row of these sees any more */
    if (window && low - window + 1 > kv) kv += (low - window + 1 - kv) / B * B;
    for (; kv < end; kv += B) cpu_attend_page(a, w, t0, t1, a->s->pages[sp->page0 + (kv - sp->kv0) / B], kv, end);
}

static void cpu_attend(const cpu_attention_job *a, cpu_rows *w) {
    const toka_shape *sh = a->d->shape;
    size_t D = (size_t)sh->D, H = (size_t)sh->H, dp = (size_t)a->d->dp;
    int n = (w->r1 - w->r0) * w->G;
    float scale = 1.0f / sqrtf((float)sh->D);
    memset(w->acc, 0, (size_t)n * dp * sizeof *w->acc);
    for (int i = 0; i < n; i++) {
        const float *q = a->q + ((size_t)(w->r0 + i / w->G) * H + (size_t)(w->h * w->G + i % w->G)) * D;
        for (size_t j = 0; j < D; j++) w->q[(size_t)i * D + j] = q[j] * scale;
        w->st[i] = (cpu_softmax){w->acc + (size_t)i * dp, -INFINITY, 0};
    }
    for (int i = 0; i < a->s->n_spans; i++) {
        const toka_span *sp = &a->s->spans[i];
        if (sp->row0 < w->r1 && sp->row0 + sp->n_rows > w->r0) cpu_attend_span(a, w, sp);
    }
    for (int i = 0; i < n; i++) {
        float *o = a->o + ((size_t)(w->r0 + i / w->G) * H + (size_t)(w->h * w->G + i % w->G)) * D;
        for (size_t j = 0; j < D; j++) o[j] = w->st[i].acc[j] / w->st[i].sum;
    }
}

static void cpu_attention_item(void *arg, int thread, int item) {
    const cpu_attention_job *a = arg;
    const toka_device *d = a->d;
    const toka_shape *sh = d->shape;
    int groups = (sh->K + a->heads - 1) / a->heads, r0 = item / groups * a->tokens, h0 = item % groups * a->heads;
    float *at = d->scratch + (size_t)thread * d->scratch_n;
    size_t n = (size_t)d->queries;
    cpu_rows w = {.r0 = r0, .r1 = MIN(r0 + a->tokens, a->s->T), .G = sh->H / sh->K, .scores = at,
                  .acc = at + n * (size_t)d->bp,
                  .q = at + n * (size_t)(d->bp + d->dp)};
    w.st = (cpu_softmax *)(void *)(at + n * (size_t)(d->bp + 2 * d->dp));
    for (w.h = h0; w.h < MIN(h0 + a->heads, sh->K); w.h++) cpu_attend(a, &w);
}

static void cpu_attention(toka_device *d, const toka_step *s, int layer, toka_dev q, toka_dev o) {
    const toka_shape *sh = d->shape;
    if (!cpu_enter(d, "attention")) return;
    int G = sh->H / sh->K, want = 4 * d->pool.n; /* items, so that threads end together */
    int most = MAX(1, CPU_QUERIES / G), tokens = (int)((int64_t)s->T * sh->K / want);
    cpu_attention_job a = {.d = d, .s = s, .layer = layer, .tokens = MIN(MAX(tokens, 1), most), .q = cpu_at(q),
                           .o = cpu_at(o)};
    int blocks = (s->T + a.tokens - 1) / a.tokens;
    a.heads = blocks >= want ? sh->K : 1; /* all heads in one item: the spans are searched once */
    int64_t seen = 0;
    for (int i = 0; i < s->n_spans; i++) seen += (int64_t)s->spans[i].n_rows * s->spans[i].n_kv;
    cpu_run(&d->pool, cpu_attention_item, &a, blocks * ((sh->K + a.heads - 1) / a.heads), seen * sh->H * sh->D * 2);
}

/* ---- Op: out_residual ---- */

static void cpu_out_residual(toka_device *d, const toka_step *s, int layer, toka_dev o, toka_dev x) {
    const toka_layer *l = &d->weights->layers[layer];
    int HD = d->shape->H * d->shape->D, E = d->shape->E;
    if (!cpu_enter(d, "out_residual")) return;
    const bool first = d->options.tp_rank == 0; /* of those whose results are added up, one has the old x and the bias */
    const float *bias = first ? cpu_vec(d, 0, &l->o_bias) : NULL;
    for (int t0 = 0; t0 < s->T; t0 += d->chunk) {
        int n = MIN(d->chunk, s->T - t0);
        float *y = cpu_at(x) + (size_t)t0 * (size_t)E;
        cpu_norm_run((cpu_norm){d, cpu_at(o) + (size_t)t0 * (size_t)HD, NULL, NULL, HD}, n);
        cpu_product p = {.d = d, .x = d->x, .ldx = (size_t)d->ldx, .T = n, .n_w = 1, .w = {&l->o}, .y = {y},
                         .ldy = {(size_t)E},
                         .add = first};
        cpu_product_run(&p);
        for (int i = 0; bias && i < n * E; i++) y[i] += bias[i % E];
    }
}

/* ---- Op: norm_mlp_residual ---- */

static void cpu_swiglu_item(void *arg, int thread, int t) {
    toka_device *d = arg;
    (void)thread;
    size_t at = (size_t)t * (size_t)d->ldf;
    cpu_swiglu(d->gate + at, d->up + at, cpu_up16(d->shape->F));
}

static void cpu_norm_mlp_residual(toka_device *d, const toka_step *s, int layer, toka_dev x) {
    const toka_layer *l = &d->weights->layers[layer];
    size_t E = (size_t)d->shape->E, ldf = (size_t)d->ldf;
    if (!cpu_enter(d, "norm_mlp_residual")) return;
    const float *norm = cpu_vec(d, 0, &l->mlp_norm);
    for (int t0 = 0; t0 < s->T; t0 += d->chunk) {
        int n = MIN(d->chunk, s->T - t0);
        float *y = cpu_at(x) + (size_t)t0 * E;
        cpu_norm_run((cpu_norm){d, y, norm, NULL, d->shape->E}, n);
        cpu_product in = {.d = d, .x = d->x, .ldx = (size_t)d->ldx, .T = n, .n_w = 2, .w = {&l->gate, &l->up},
                          .y = {d->gate, d->up}, .ldy = {ldf, ldf}};
        cpu_product_run(&in);
        cpu_run(&d->pool, cpu_swiglu_item, d, n, (int64_t)n * d->shape->F * 8);
        cpu_product out = {.d = d, .x = d->gate, .ldx = ldf, .T = n, .n_w = 1, .w = {&l->down}, .y = {y}, .ldy = {E},
                           .add = d->options.tp_rank == 0};
        cpu_product_run(&out);
    }
}

/* ---- Op: norm_logits_sample ---- */

typedef struct cpu_pick_job {
    toka_device *d;
    const toka_out_row *rows;
    toka_pick *picks;
    float *logits, *wanted; /* [n][V_all]; wanted: raw logits for the step, or NULL */
    int first, step;        /* item i is row first + i * step */
} cpu_pick_job;

static void cpu_pick_item(void *arg, int thread, int i) {
    const cpu_pick_job *p = arg;
    (void)thread;
    const int V = p->d->shape->V_all, row = p->first + i * p->step;
    float *logits = p->logits + (size_t)row * (size_t)V;
    if (p->wanted) memcpy(p->wanted + (size_t)row * (size_t)V, logits, (size_t)V * sizeof *logits);
    samp_row(&p->rows[row], logits, V, &p->picks[row]);
}

static void cpu_pick_run(cpu_pick_job *job, int n) {
    const int items = (n - job->first + job->step - 1) / job->step;
    cpu_run(&job->d->pool, cpu_pick_item, job, items, (int64_t)items * job->d->shape->V_all * 8);
}

/* Picks for n rows whose logits are there, or with tp ranks each rank's columns of them: each then takes some of the rows. */
static void cpu_pick_rows(toka_device *d, const toka_out_row *rows, int n, float *wanted, toka_pick *picks) {
    cpu_pick_job job = {d, rows, picks, d->logits, wanted, 0, 1};
    cpu_stage *stage = d->stage;
    if (!d->group || d->group->tp_size == 1) {
        cpu_pick_run(&job, n);
        return;
    }
    if (d->options.tp_rank == 0) stage->wanted = wanted;
    if (!cpu_meet(d)) return;
    job.picks = stage->picks, job.wanted = stage->wanted, job.first = d->options.tp_rank, job.step = d->group->tp_size;
    cpu_pick_run(&job, n);
    cpu_meet_end(d);
    memcpy(picks, stage->picks, (size_t)n * sizeof *picks); /* nobody writes there before the next meeting */
}

/* The drawn ids become the last tokens of their slots; with stages tp rank 0 of the last stage tells the first. */
static void cpu_keep_drawn(toka_device *d, const toka_step *s, const toka_pick *picks) {
    toka_group *g = d->group;
    const bool staged = g && g->pp_size > 1;
    if (g && (atomic_load(&g->broken) || (staged && d->options.tp_rank))) return;
    for (int i = 0; i < s->n_out; i++)
        if (s->out[i].slot >= 0 && s->out[i].slot < d->options.n_slots) d->last[s->out[i].slot] = picks[i].id;
    assert(!staged || s->number > atomic_load(&g->drawn));
    if (staged) cpu_group_raise(g, &g->drawn, s->number - atomic_load(&g->drawn), false);
}

static void cpu_norm_logits_sample(toka_device *d, const toka_step *s, toka_dev x, toka_pick *picks) {
    const toka_shape *sh = d->shape;
    size_t V = (size_t)sh->V_all;
    if (!cpu_enter(d, "norm_logits_sample")) return;
    const float *norm = cpu_vec(d, 0, &d->weights->norm);
    for (int i0 = 0; i0 < s->n_out; i0 += d->out_chunk) {
        int n = MIN(d->out_chunk, s->n_out - i0);
        for (int i = i0; i < i0 + n; i++) assert(s->out[i].row >= 0 && s->out[i].row < s->T);
        cpu_norm_run((cpu_norm){d, cpu_at(x), norm, s->out + i0, sh->E}, n);
        cpu_product p = {.d = d, .x = d->x, .ldx = (size_t)d->ldx, .T = n, .n_w = 1, .w = {&d->weights->lm_head},
                         .y = {d->logits + sh->v0}, .ldy = {V}};
        cpu_product_run(&p);
        cpu_pick_rows(d, s->out + i0, n, s->logits ? s->logits + (size_t)i0 * V : NULL, picks + i0);
    }
    cpu_keep_drawn(d, s, picks);
}

/* ---- Open, close, memory ---- */

static void cpu_close(toka_device *d) {
    if (!d) return;
    cpu_pool_close(&d->pool);
    for (int i = 0; i < d->n_blocks; i++) munmap(d->blocks[i].p, d->blocks[i].bytes);
    free(d);
}

static int cpu_check(const toka_device_options *o, const toka_shape *s, toka_err *e) {
    if (s->L < 1 || s->H < 1 || s->K < 1 || s->E < 1 || s->F < 1 || s->V < 1 || s->B < 1 || s->H % s->K)
        return fail(e, TOKA_E_INPUT,
                    "CPU backend: layers %d, heads %d, kv heads %d, width %d, mlp width %d, vocabulary %d, page "
                    "%d: all must be positive and kv heads divide heads", s->L, s->H, s->K, s->E, s->F, s->V, s->B);
    if (s->D < 2 || s->D > CPU_HEAD || s->D % 2)
        return fail(e, TOKA_E_INPUT, "CPU backend: head size %d, expected an even number up to %d", s->D, CPU_HEAD);
    if (s->H > INT_MAX / s->D) return fail(e, TOKA_E_INPUT, "CPU backend: %d heads of size %d are too many", s->H, s->D);
    if (s->v0 < 0 || s->v0 > s->V_all - s->V)
        return fail(e, TOKA_E_INPUT, "CPU backend: %d ids from %d on, the vocabulary has %d", s->V, s->v0, s->V_all);
    if (o->max_tokens < 1 || o->max_out < 1 || o->n_pages < 1 || o->n_pages > INT_MAX / s->B || o->n_threads < 0 ||
        o->n_threads > CPU_THREADS || o->n_slots < 0)
        return fail(e, TOKA_E_USE, "CPU backend: %d tokens and %d outputs a step, %d pages, %d threads: out of range",
                    o->max_tokens, o->max_out, o->n_pages, o->n_threads);
    const int tp = o->group ? o->group->tp_size : 1, pp = o->group ? o->group->pp_size : 1;
    if (MAX(o->tp_size, 1) != tp || MAX(o->pp_size, 1) != pp || o->tp_rank < 0 || o->tp_rank >= tp || o->pp_rank < 0 ||
        o->pp_rank >= pp)
        return fail(e, TOKA_E_USE, "CPU backend: stage %d of %d, tensor rank %d of %d, expected a place among %d stages of %d tensor "
                    "ranks", o->pp_rank, o->pp_size, o->tp_rank, o->tp_size, pp, tp);
    return 0;
}

/* Cuts the chunks to the scratch budget, then takes all memory. */
static void cpu_take_memory(toka_device *d) {
    const toka_shape *s = d->shape;
    size_t KD = (size_t)(s->K * s->D), pages = (size_t)d->options.n_pages, D = (size_t)s->D;
    d->ldx = cpu_up16(MAX(s->E, s->H * s->D)) + 16, d->ldf = cpu_up16(s->F) + 16;
    size_t token = ((size_t)d->ldx + 2 * KD + 2 * (size_t)d->ldf) * sizeof(float);
    d->chunk = (int)MIN((size_t)MIN(d->options.max_tokens, CPU_CHUNK), MAX(CPU_SCRATCH / token, 1));
    d->out_chunk = (int)MIN((size_t)MIN(d->options.max_out, CPU_OUT_CHUNK), MAX(CPU_SCRATCH / 2 / ((size_t)s->V_all * 4), 1));
    d->bp = cpu_up16(s->B), d->dp = cpu_up16(s->D);
    d->page_k = (size_t)s->K * D * (size_t)d->bp, d->page_v = (size_t)(s->K * s->B) * (size_t)d->dp;
    d->queries = MAX(CPU_QUERIES, s->H / s->K);
    size_t rows = (size_t)d->queries * ((size_t)(d->bp + 2 * d->dp) + sizeof(cpu_softmax) / sizeof(float));
    d->scratch_n = (MAX((size_t)CPU_PANEL * CPU_PANEL_LD, rows) + 15) & ~(size_t)15;
    size_t chunk = (size_t)d->chunk;
    d->kv_k = cpu_zalloc(d, (size_t)s->L * pages, d->page_k * sizeof(float));
    d->kv_v = cpu_zalloc(d, (size_t)s->L * pages, d->page_v * sizeof(float));
    d->x = cpu_zalloc(d, (size_t)MAX(d->chunk, d->out_chunk), (size_t)d->ldx * sizeof(float));
    d->k = cpu_zalloc(d, chunk, KD * sizeof(float));
    d->v = cpu_zalloc(d, chunk, KD * sizeof(float));
    d->gate = cpu_zalloc(d, chunk, (size_t)d->ldf * sizeof(float));
    d->up = cpu_zalloc(d, chunk, (size_t)d->ldf * sizeof(float));
    const bool alone = !d->group || d->group->tp_size == 1, last = !d->group || d->options.pp_rank == d->group->pp_size - 1;
    if (alone && last) d->logits = cpu_zalloc(d, (size_t)d->out_chunk, (size_t)s->V_all * sizeof(float));
    if (!d->group || d->group->pp_size == 1) d->last = cpu_zalloc(d, (size_t)d->options.n_slots, sizeof(int32_t));
    d->vec = cpu_zalloc(d, 6, (size_t)MAX(s->E, s->H * s->D) * sizeof(float));
    d->scratch = cpu_zalloc(d, (size_t)d->pool.n, d->scratch_n * sizeof(float));
}

static int cpu_open(toka_device **out, const toka_device_options *o, const toka_shape *shape, const toka_weights *weights,
                    toka_err *e) {
    if (cpu_check(o, shape, e)) return e->code;
    toka_device *d = mem_zalloc(sizeof *d);
    const int n_ranks = o->group ? o->group->tp_size * o->group->pp_size : 1;
    *d = (toka_device){.shape = shape, .weights = weights, .options = *o, .kernels = &cpu_sets[cpu_n_sets() - 1], .group = o->group,
                       .fault_in = cpu_debug("TOKA_DEBUG_FAULT"), .stall_in = cpu_debug("TOKA_DEBUG_STALL")};
    if (cpu_pool_open(&d->pool, o->n_threads ? o->n_threads : MAX(os_n_cores() / n_ranks, 1), e)) {
        free(d);
        return e->code;
    }
    if (d->group) d->pool.progress = &d->group->progress;
    cpu_take_memory(d);
    snprintf(d->about, sizeof d->about, "CPU, %s, %d thread%s", d->kernels->name, d->pool.n, d->pool.n > 1 ? "s" : "");
    if (!d->error.code && d->group) cpu_group_join(d, &d->error);
    if (d->error.code) {
        *e = d->error;
        cpu_close(d);
        return e->code;
    }
    *out = d;
    return 0;
}

static int cpu_probe(int i, char *line, size_t bytes) {
    int n = os_n_cores();
    snprintf(line, bytes, "%s kernels, %d core%s, %.0f GB", cpu_sets[cpu_n_sets() - 1].name, n, n > 1 ? "s" : "",
             (double)os_ram_bytes() / 1e9);
    return i == 0;
}

static int64_t cpu_kv_bytes(const toka_shape *shape, const toka_weights *weights, const toka_device_options *o) {
    (void)shape, (void)weights;
    return os_ram_bytes() / 4 / MAX(o->n_devices, 1);
}

static const char *cpu_describe(const toka_device *d) { return d->about; }

/* The group's failure becomes the device's. */
static void cpu_latch_group(toka_device *d) {
    toka_group *g = d->group;
    const char *op = atomic_load(&d->rank->op);
    char name[64];
    pthread_mutex_lock(&g->lock);
    cpu_rank_name(g, (int)(d->rank - g->ranks), name);
    if (g->error.code) d->error = g->error;
    else fail(&d->error, TOKA_E_DEVICE, "CPU backend: the ranks were told to end; %s was in %s", name, op ? op : "no op");
    pthread_mutex_unlock(&g->lock);
}

static int cpu_status(toka_device *d, toka_err *e) {
    if (!d->error.code && d->group && atomic_load(&d->group->broken)) cpu_latch_group(d);
    if (d->error.code) *e = d->error;
    return d->error.code;
}

static toka_dev cpu_alloc(toka_device *d, size_t bytes) { return (toka_dev){(uintptr_t)cpu_zalloc(d, bytes, 1)}; }
static void cpu_upload(toka_device *d, toka_dev to, const void *from, size_t bytes) {
    (void)d;
    memcpy(cpu_at(to), from, bytes);
}
static void cpu_download(toka_device *d, void *to, toka_dev from, size_t bytes) {
    (void)d;
    memcpy(to, cpu_at(from), bytes);
}

const toka_backend toka_cpu = {
    .name = "cpu",
    .probe = cpu_probe,
    .kv_bytes = cpu_kv_bytes,
    .open = cpu_open,
    .close = cpu_close,
    .describe = cpu_describe,
    .status = cpu_status,
    .alloc = cpu_alloc,
    .upload = cpu_upload,
    .download = cpu_download,
    .group_open = cpu_group_open,
    .group_close = cpu_group_close,
    .group_abort = cpu_group_abort,
    .all_reduce = cpu_all_reduce,
    .send = cpu_send,
    .receive = cpu_receive,
    .embed = cpu_embed,
    .norm_qkv_rope_kv = cpu_norm_qkv_rope_kv,
    .attention = cpu_attention,
    .out_residual = cpu_out_residual,
    .norm_mlp_residual = cpu_norm_mlp_residual,
    .norm_logits_sample = cpu_norm_logits_sample,
    .activation_bytes = sizeof(float),
    .page_tok = 16,
    .default_tokens = 512,
    .default_seqs = 256,
    .merge_tok = 4,
    .span_tok = 32,
    .tile_rows = 8,
    .n_ahead = 2,
};

/* ===========================================================================
 * MARK: 17. Model: the layer loop [os]
 * The transformer, once, over the backend's table: what runs on a CPU and on a GPU is rank_step. One step takes T tokens of
 * any number of sequences, some prefilling, some decoding; the plan in toka_step says which is which, this loop does not care.
 *
 * A rank is a device with its part of the weights and a thread of its own, which opens it, runs step after step in the order
 * in which they were posted, and closes it. A model is a grid of ranks, stages of layers x tensor ranks (mf_shard of chapter 10);
 * stages hand x on, tensor ranks sum it:
 *
 *     model_post --> ring of steps --> every rank: rank_step --> done --> model_wait        one thread posts and waits
 *
 * What always holds: a posted step, and all it points to, stays as it is until model_wait has returned for it; the first
 * failure is kept and told to all ranks, steps behind it are not run, and whoever waits gets it. A rank that does not come back
 * even then is lost: nothing that it may still look at is freed.
 * =========================================================================== */

enum {
    MODEL_RING = 64,  /* steps under way at most */
    MODEL_GRACE_S = 5 /* for ranks to come back after a failure */
};

typedef struct model_job { /* a step and where its picks go */
    const toka_step *s;
    toka_pick *picks;
} model_job;

typedef struct model_bell { /* of all models that one thread waits for */
    pthread_mutex_t lock;
    pthread_cond_t done; /* some rank ran a step, or opened its device */
} model_bell;

typedef struct model_rank {
    struct model_run *m;
    toka_device_options options;
    toka_shape shape;
    toka_weights weights;
    toka_device *dev;
    toka_dev x, q, o;  /* [T][E], [T][H][D], [T][H][D]: activations of one step */
    toka_pick *unread; /* [max_out] picks of a rank that nobody asks for them */
    pthread_t thread;
    int64_t done;      /* under the lock: steps run, or skipped behind a failure */
    double busy_s;     /* under the lock: time in steps */
} model_rank;

typedef struct model_run {
    const toka_backend *be;
    toka_group *group; /* of more than one rank */
    model_rank *ranks; /* [pp][tp] */
    int tp, pp, n_ranks, n_started, n_open; /* n_open: of those started, tried to open their device */
    arena a;             /* of the ranks' weights */
    model_bell *bell;    /* its lock guards all that follows, and `done` and busy_s of the ranks */
    pthread_cond_t to_do;
    model_job ring[MODEL_RING];
    int64_t posted;
    bool closing, lost;
    toka_err broken; /* code 0: all devices work */
} model_run;

static void rank_sum(model_rank *r, int rows) {
    if (r->m->tp > 1) r->m->be->all_reduce(r->dev, r->x, rows);
}

static void rank_step(model_rank *r, const toka_step *s, toka_pick *picks) {
    const toka_backend *be = r->m->be;
    if (r->options.pp_rank == 0) be->embed(r->dev, s, r->x), rank_sum(r, s->T);
    else be->receive(r->dev, r->x, s->T);
    for (int layer = 0; layer < r->shape.L; layer++) {
        be->norm_qkv_rope_kv(r->dev, s, layer, r->x, r->q);
        be->attention(r->dev, s, layer, r->q, r->o);
        be->out_residual(r->dev, s, layer, r->o, r->x), rank_sum(r, s->T);
        be->norm_mlp_residual(r->dev, s, layer, r->x), rank_sum(r, s->T);
    }
    if (r->options.pp_rank < r->m->pp - 1) be->send(r->dev, r->x, s->T);
    else if (s->n_out) be->norm_logits_sample(r->dev, s, r->x, r->options.tp_rank ? r->unread : picks);
}

static int rank_open(model_rank *r, toka_err *e) {
    const toka_backend *be = r->m->be;
    const toka_shape *s = &r->shape;
    int code = be->open(&r->dev, &r->options, s, &r->weights, e);
    if (code) return code;
    size_t tokens = (size_t)r->options.max_tokens, heads = tokens * (size_t)s->H * (size_t)s->D * be->activation_bytes;
    r->x = be->alloc(r->dev, tokens * (size_t)((s->E + 7) / 8 * 8) * be->activation_bytes);
    r->q = be->alloc(r->dev, heads);
    r->o = be->alloc(r->dev, heads);
    if (r->options.tp_rank) r->unread = mem_alloc((size_t)r->options.max_out * sizeof *r->unread);
    return be->status(r->dev, e);
}

/* Tells the others that this rank has come so far; with the lock held. */
static void rank_report(model_rank *r, int code, const toka_err *e) {
    model_run *m = r->m;
    if (code && !m->broken.code) {
        m->broken = *e;
        if (m->group) m->be->group_abort(m->group);
    }
    pthread_cond_broadcast(&m->bell->done);
}

static void *rank_run(void *arg) {
    model_rank *r = arg;
    model_run *m = r->m;
    toka_err e;
    int code = rank_open(r, &e);
    pthread_mutex_lock(&m->bell->lock);
    m->n_open++;
    rank_report(r, code, &e);
    for (;;) {
        while (r->done == m->posted && !m->closing) pthread_cond_wait(&m->to_do, &m->bell->lock);
        if (r->done == m->posted) break;
        model_job job = m->ring[r->done % MODEL_RING];
        bool skip = m->broken.code != 0;
        pthread_mutex_unlock(&m->bell->lock);
        double t0 = os_now();
        if (!skip) rank_step(r, job.s, job.picks);
        code = skip ? 0 : m->be->status(r->dev, &e);
        pthread_mutex_lock(&m->bell->lock);
        r->busy_s += os_now() - t0, r->done++;
        rank_report(r, code, &e);
    }
    pthread_mutex_unlock(&m->bell->lock);
    if (r->dev) m->be->close(r->dev);
    return NULL;
}

/* Ends the ranks when they have run what was posted. False: one is lost, and all stays as it is. */
static bool model_close(model_run *m) {
    if (m->n_started) {
        pthread_mutex_lock(&m->bell->lock);
        m->closing = true;
        pthread_cond_broadcast(&m->to_do);
        pthread_mutex_unlock(&m->bell->lock);
        for (int i = 0; i < m->n_started; i++)
            if (m->lost) pthread_detach(m->ranks[i].thread);
            else pthread_join(m->ranks[i].thread, NULL);
        if (m->lost) return false;
        pthread_cond_destroy(&m->to_do);
    }
    if (m->group) m->be->group_close(m->group);
    for (int i = 0; i < m->n_ranks; i++) free(m->ranks[i].unread);
    arena_free(&m->a);
    free(m->ranks);
    *m = (model_run){0};
    return true;
}

/* Cuts a model into its ranks, which are started later. */
static int model_cut(model_run *m, const toka_backend *be, const toka_shape *shape, const toka_weights *weights, int tp, int pp,
                     toka_err *e) {
    *m = (model_run){.be = be, .tp = tp, .pp = pp, .n_ranks = tp * pp, .ranks = mem_zalloc((size_t)(tp * pp) * sizeof *m->ranks)};
    for (int i = 0; i < m->n_ranks; i++) {
        model_rank *r = &m->ranks[i];
        mf_rank at = {.tp_rank = i % tp, .tp_size = tp, .pp_rank = i / tp, .pp_size = pp};
        r->m = m, r->options = (toka_device_options){.tp_rank = at.tp_rank, .tp_size = tp, .pp_rank = at.pp_rank, .pp_size = pp};
        if (mf_shard(shape, weights, &at, &m->a, &r->shape, &r->weights, e)) return e->code;
    }
    return 0;
}

/* Starts the ranks, which open their devices side by side; model_ready waits for them. o: all but the place in the group. */
static int model_start(model_run *m, model_bell *bell, const toka_device_options *o, int max_len, toka_err *e) {
    m->bell = bell;
    if (m->n_ranks > 1 && m->be->group_open(&m->group, m->tp, m->pp, e)) return e->code;
    pthread_cond_init(&m->to_do, NULL);
    for (int i = 0; i < m->n_ranks; i++) {
        model_rank *r = &m->ranks[i];
        toka_device_options place = r->options;
        r->shape.max_len = max_len, r->options = *o, r->options.group = m->group;
        r->options.tp_rank = place.tp_rank, r->options.tp_size = m->tp, r->options.pp_rank = place.pp_rank, r->options.pp_size = m->pp;
        if (i) r->options.progress = NULL;
        int err = pthread_create(&r->thread, NULL, rank_run, r);
        if (err) return fail(e, TOKA_E_IO, "cannot start a thread: %s", strerror(err));
        m->n_started++;
    }
    return 0;
}

static int model_ready(model_run *m, toka_err *e) {
    pthread_mutex_lock(&m->bell->lock);
    while (m->n_open < m->n_started) pthread_cond_wait(&m->bell->done, &m->bell->lock);
    int code = m->broken.code;
    if (code) *e = m->broken;
    pthread_mutex_unlock(&m->bell->lock);
    return code;
}

/* Queues a step for all ranks. Returns its number, 1, 2, 3 ... picks: [s->n_out], filled when model_wait returns 0. */
static int64_t model_post(model_run *m, const toka_step *s, toka_pick *picks) {
    pthread_mutex_lock(&m->bell->lock);
    for (int i = 0; i < m->n_ranks; i++) assert(m->posted - m->ranks[i].done < MODEL_RING);
    m->ring[m->posted % MODEL_RING] = (model_job){s, picks};
    int64_t number = ++m->posted;
    pthread_cond_broadcast(&m->to_do);
    pthread_mutex_unlock(&m->bell->lock);
    return number;
}

/* With the bell's lock held: no rank needs step `number`, and those before it, any more. */
static bool model_is_done(const model_run *m, int64_t number) {
    for (int i = 0; i < m->n_ranks; i++)
        if (m->ranks[i].done < number) return false;
    return true;
}

/* Waits until model_is_done. */
static int model_wait(model_run *m, int64_t number, toka_err *e) {
    struct timespec until;
    pthread_mutex_lock(&m->bell->lock);
    while (!model_is_done(m, number) && !m->broken.code) pthread_cond_wait(&m->bell->done, &m->bell->lock);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += MODEL_GRACE_S;
    while (!model_is_done(m, number) && !m->lost) m->lost = pthread_cond_timedwait(&m->bell->done, &m->bell->lock, &until) == ETIMEDOUT;
    int code = m->broken.code;
    if (code) *e = m->broken;
    pthread_mutex_unlock(&m->bell->lock);
    return code;
}

/* One forward step, waited for. */
UNUSED static int model_step(model_run *m, const toka_step *s, toka_pick *picks, toka_err *e) {
    return model_wait(m, model_post(m, s, picks), e);
}

/* Seconds that the first rank spent in steps. */
static double model_busy(model_run *m) {
    pthread_mutex_lock(&m->bell->lock);
    double busy = m->ranks[0].busy_s;
    pthread_mutex_unlock(&m->bell->lock);
    return busy;
}

/* ===========================================================================
 * MARK: 18. Engine [os]
 * Requests to steps to events. Any thread submits and cancels; one thread at a time drives:
 *
 *     eng_submit --> inbox --eng_take--> sched_submit (13)          any thread | the driver from here on
 *         +-> sched_plan (13) --> batch_build (14) --> eng_rows --> model_post (17) ... model_wait --> eng_commit --+
 *         +---------------------------------------------------------------------------------------------------------+
 *
 * The driver is whoever needs a result: a thread in eng_drive runs steps until what it waits for is done, and the next one that
 * waits takes over. Callbacks run on the driving thread, between steps.
 *
 * Run-ahead. While the ranks (17) run a step, the driver plans the next: up to n_ahead steps fly, from their plan to their commit,
 * each with arrays of its own (eng_flight). A step plans on the tokens of those before it, which only the device knows yet. What a
 * sample that meanwhile ended, was parked or cancelled would still have drawn is thrown away; no result depends on n_ahead.
 *
 * Replicas. Each has the whole model on ranks of its own, its own pages and its own scheduler. A request goes to the one that would have
 * the least left to do, in tokens, when it were done there: what it already computed of the prompt counts for it.
 *
 * What always holds:
 *   - eng.lock guards the inbox, the list of cancels, `driven`, `stopping`, the broken state and the copy of the statistics;
 *     everything else belongs to the driver;
 *   - every sample of an accepted request ends in exactly one event that is not TOKA_RUNNING;
 *   - a request is freed when its last event went out and no step flies that has a row of it;
 *   - a step allocates nothing but what events carry (texts grow to their longest once).
 * =========================================================================== */

#define ENG_MAX_N (1 << 20)       /* samples of one request */
#define ENG_MAX_SAMPLES (1 << 28) /* of all requests under way */
#define ENG_MAX_AHEAD 4
#define ENG_MAX_SPLIT 64 /* replicas, stages, tensor ranks */

typedef struct eng_request { /* from eng_submit until its last event */
    int64_t id;
    struct eng_replica *home; /* NULL: still in the inbox */
    int sched_id;
    double work, work_each; /* tokens that it counts for at home, in all and for a sample; what ended does not count */
    arena a;      /* all that follows by pointer */
    int32_t *prompt;
    int n_prompt, n, n_live;
    int n_flying; /* rows of steps that fly and point to this request */
    bool over;    /* it had its last event */
    bool *ended; /* [n] */
    toka_sampling sampling, scoring; /* scoring: of the prompt's places, only logprobs counts */
    bool scores;     /* the prompt's tokens are wanted, by sample 0, which computes them all */
    bool score_only; /* and nothing else: n is 1 here, its sample draws nothing and has events of TOKA_PROMPT */
    bool ids_only, keep_special;
    int n_scored;    /* tokens of the prompt whose events went out */
    int priority;
    uint64_t class_key;
    ids ends; /* ids that end a sample; owned */
    toka_event_fn *fn;
    void *user;
    toka_usage usage;
    double t_submit, t_first; /* 0: no token yet */
    bool *done;               /* set under the lock after the last event, if not NULL */
    struct eng_request *next; /* in the inbox */
} eng_request;

typedef struct eng_slot { /* of a scheduler's slot: what turns its ids into text */
    bool open;
    stop_scan stop;
    tok_stream stream;
} eng_slot;

typedef struct eng_place { /* a row whose logits say how likely token number `at` of a prompt was */
    int q, at;
    uint32_t ticket;
} eng_place;

typedef struct eng_flight { /* a step from its plan to its commit: all that it reads is its own or of requests that wait for it */
    batch_step b;
    toka_out_row *out;    /* [max_tokens] the rows that yield a token, then those of scores */
    toka_pick *picks;     /* [max_tokens] */
    eng_request **whose;  /* [max_tokens] */
    eng_place *places;    /* [max_tokens] */
    int n_places;
    ids known;            /* for rows with penalties or bad words: copies of their tokens, and ids that they may not draw */
    int64_t number;       /* model_post's */
    double plan_s;
} eng_flight;

typedef struct eng_replica {
    struct eng *g;
    model_run m;
    sched s;
    batch b;
    eng_flight flights[ENG_MAX_AHEAD]; /* a ring: n_flying from number `first` on */
    int n_ahead, first, n_flying;
    eng_slot *slots;          /* [max_seqs] */
    eng_request **by_sched;   /* [cap_by_sched] of the scheduler's request ids */
    int cap_by_sched, n_live; /* requests that the scheduler has */
    double work;              /* of them */
    int64_t drawn;            /* number of the last step that draws */
} eng_replica;

typedef struct eng { /* pools are sized at open and never grow */
    const toka_backend *be;
    const mf_model *files;
    const tok *tok; /* NULL: events carry no text */
    int max_len, max_seqs; /* max_seqs: of all replicas */
    bool no_sharing; /* every sample has pages and spans of its own */
    eng_replica *replicas;
    int n_replicas, n_busy;   /* n_busy: requests and steps that they have */
    model_bell bell;
    buf piece, text;          /* text of one token; text that became certain */
    toka_stats stats;         /* the driver's */

    pthread_mutex_t lock;
    pthread_cond_t wake;      /* something was submitted, cancelled, finished, or nobody drives any more */
    eng_request *inbox, **inbox_end;
    int64_t *cancels;
    int n_cancels, cap_cancels;
    int64_t next_id, n_samples; /* n_samples: of all requests not finished */
    bool driven, stopping;
    toka_err broken;          /* code 0: the device works */
    toka_stats shown;         /* copy of stats after each step */
} eng;

/* ---- Open and close ---- */

/* Tokens of KV to hold: every sequence at full length if that is small, else what the device has room for. */
static int64_t eng_kv_tokens(const toka_shape *s, int max_seqs, const toka_backend *be, int64_t room_bytes) {
    int64_t per_token = (int64_t)2 * s->L * s->K * s->D * (int64_t)be->activation_bytes;
    return MIN((int64_t)max_seqs * s->max_len, MAX(room_bytes, 0) / per_token);
}

/* Sets shape->max_len and the number of pages, or fails when the length asked for does not fit. asked_kv 0: as memory allows;
 * room: tokens for which the devices have memory. */
static int eng_size(toka_shape *shape, int asked_len, int64_t asked_kv, int64_t room, int *n_pages, toka_err *e) {
    if (asked_len > shape->max_len || asked_len == 1)
        return fail(e, TOKA_E_USE, "max_model_len: %d, expected 2 to %d, the model's own limit", asked_len, shape->max_len);
    if (asked_len) shape->max_len = asked_len;
    int64_t n_kv = asked_kv ? asked_kv : room;
    if (asked_len && n_kv < asked_len)
        return fail(e, asked_kv ? TOKA_E_USE : TOKA_E_MEMORY, "--max-model-len %d: %s %lld tokens of this model's KV cache", asked_len,
                    asked_kv ? "--kv-tokens asks for" : "memory holds", (long long)n_kv);
    shape->max_len = (int)MIN(n_kv, (int64_t)shape->max_len);
    if (shape->max_len < 2) return fail(e, TOKA_E_MEMORY, "not enough memory for the KV cache of one sequence");
    *n_pages = (int)MIN((n_kv + shape->B - 1) / shape->B, (int64_t)INT_MAX / shape->B);
    return 0;
}

static int eng_flight_init(eng_flight *f, const sched *s, toka_err *e) {
    size_t n = (size_t)s->c.max_tokens;
    int code = batch_step_init(&f->b, s, e);
    if (code) return code;
    f->out = mem_alloc(n * sizeof *f->out), f->picks = mem_alloc(n * sizeof *f->picks);
    f->whose = mem_alloc(n * sizeof *f->whose), f->places = mem_alloc(n * sizeof *f->places);
    return 0;
}

static void eng_replica_free(eng_replica *p) {
    for (int i = 0; i < p->n_ahead; i++) {
        eng_flight *f = &p->flights[i];
        batch_step_free(&f->b), ids_free(&f->known);
        free(f->out), free(f->picks), free(f->whose), free(f->places);
    }
    batch_free(&p->b), sched_free(&p->s);
    free(p->slots), free(p->by_sched);
}

/* All but the devices, which are still being opened. */
static int eng_replica_init(eng_replica *p, const sched_config *c, toka_err *e) {
    const toka_backend *be = p->g->be;
    p->n_ahead = be->n_ahead;
    p->slots = mem_zalloc((size_t)c->max_seqs * sizeof *p->slots);
    int code = sched_init(&p->s, c, e);
    if (!code) code = batch_init(&p->b, &p->s, (batch_cost){be->merge_tok, be->span_tok, be->tile_rows}, e);
    for (int i = 0; i < p->n_ahead && !code; i++) code = eng_flight_init(&p->flights[i], &p->s, e);
    return code;
}

/* Also of an engine that was opened half way. False: a rank is lost, and what it may look at stays. */
static bool eng_free(eng *g) {
    bool all = true;
    for (int i = 0; i < g->n_replicas; i++) all &= model_close(&g->replicas[i].m);
    if (!all) return false;
    for (int i = 0; i < g->n_replicas; i++) eng_replica_free(&g->replicas[i]);
    free(g->replicas), free(g->cancels);
    buf_free(&g->piece), buf_free(&g->text);
    pthread_mutex_destroy(&g->lock), pthread_cond_destroy(&g->wake);
    pthread_mutex_destroy(&g->bell.lock), pthread_cond_destroy(&g->bell.done);
    free(g);
    return true;
}

/* Tokens of KV for which every rank of a model has room. */
static int64_t eng_room(const model_run *m, const toka_device_options *d, int max_len, int max_seqs) {
    int64_t least = INT64_MAX;
    for (int i = 0; i < m->n_ranks; i++) {
        toka_shape s = m->ranks[i].shape;
        s.max_len = max_len;
        int64_t n = eng_kv_tokens(&s, max_seqs, m->be, m->be->kv_bytes(&s, &m->ranks[i].weights, d));
        least = MIN(least, n);
    }
    return least;
}

static eng *eng_new(const toka_backend *be, const mf_model *files, const tok *words, const toka_options *o) {
    eng *g = mem_zalloc(sizeof *g);
    g->be = be, g->files = files, g->tok = words, g->no_sharing = o->no_prefix_caching;
    g->inbox_end = &g->inbox;
    pthread_mutex_init(&g->lock, NULL), pthread_cond_init(&g->wake, NULL);
    pthread_mutex_init(&g->bell.lock, NULL), pthread_cond_init(&g->bell.done, NULL);
    g->n_replicas = MAX(o->data_parallel_size, 1);
    g->replicas = mem_zalloc((size_t)g->n_replicas * sizeof *g->replicas);
    return g;
}

/* Cuts the model, sizes the KV cache, opens all devices. */
static int eng_open_replicas(eng *g, toka_shape *shape, const toka_options *o, sched_config *c, toka_err *e) {
    const int tp = MAX(o->tensor_parallel_size, 1), pp = MAX(o->pipeline_parallel_size, 1), n_devices = tp * pp * g->n_replicas;
    const int n_threads = o->n_threads || n_devices == 1 ? o->n_threads : os_n_cores();
    toka_device_options d = {.n_threads = n_devices > 1 ? MAX(n_threads / n_devices, 1) : n_threads, .max_tokens = c->max_tokens,
                             .max_out = c->max_tokens, .n_slots = c->max_seqs, .n_devices = n_devices,
                             .memory_utilization = o->gpu_memory_utilization, .progress = o->progress, .user = o->progress_user};
    int code = 0;
    if (n_devices > 1 && !g->be->group_open)
        return fail(e, TOKA_E_USE, "%d devices for %d replicas of %d stages of %d tensor ranks: the %s backend runs on one so far, only "
                    "--device cpu has ranks", n_devices, g->n_replicas, pp, tp, g->be->name);
    for (int i = 0; i < g->n_replicas && !code; i++)
        code = model_cut(&g->replicas[i].m, g->be, shape, &g->files->weights, tp, pp, e);
    if (code) return code;
    int64_t room = o->kv_tokens ? 0 : eng_room(&g->replicas[0].m, &d, o->max_model_len ? o->max_model_len : shape->max_len, c->max_seqs);
    if ((code = eng_size(shape, o->max_model_len, o->kv_tokens, room, &c->n_pages, e))) return code;
    d.n_pages = c->n_pages, c->max_len = shape->max_len;
    for (int i = 0; i < g->n_replicas && !code; i++) {
        eng_replica *p = &g->replicas[i];
        p->g = g;
        code = model_start(&p->m, &g->bell, &d, shape->max_len, e);
        if (!code) code = eng_replica_init(p, c, e);
    }
    for (int i = 0; i < g->n_replicas && !code; i++) code = model_ready(&g->replicas[i].m, e);
    return code;
}

/* shape: the model's, with B and max_len still to be set here; it must outlive the engine. */
static int eng_open(eng **out, const toka_backend *be, const mf_model *files, toka_shape *shape, const tok *words,
                    const toka_options *o, toka_err *e) {
    int max_tokens = o->max_num_batched_tokens ? o->max_num_batched_tokens : MAX(be->default_tokens, o->max_num_seqs);
    int max_seqs = o->max_num_seqs ? o->max_num_seqs : MIN(be->default_seqs, max_tokens);
    if (max_seqs > max_tokens) /* every running sample may want a row of the step */
        return fail(e, TOKA_E_USE, "max_num_batched_tokens: %d, expected at least max_num_seqs, %d", max_tokens, max_seqs);
    shape->B = be->page_tok;
    sched_config c = {.B = shape->B, .max_seqs = max_seqs, .max_tokens = max_tokens, .n_classes = 4096};
    eng *g = eng_new(be, files, words, o);
    int code = eng_open_replicas(g, shape, o, &c, e);
    if (code) {
        eng_free(g);
        return code;
    }
    g->max_len = shape->max_len, g->max_seqs = g->n_replicas * max_seqs, g->stats.kv_pages = g->n_replicas * c.n_pages;
    *out = g;
    return 0;
}

/* ---- Submit and cancel: any thread ---- */

static void eng_request_free(eng_request *r) {
    ids_free(&r->ends);
    arena a = r->a;
    arena_free(&a);
    free(r);
}

static void *eng_copy(arena *a, const void *p, size_t n) { return n ? memcpy(arena_alloc(a, n), p, n) : NULL; }

/* A copy of the request that owns all it points to. */
static eng_request *eng_request_new(const eng *g, const toka_request *r, const int32_t *prompt, int n_prompt) {
    eng_request *q = mem_zalloc(sizeof *q);
    toka_sampling *s = &q->sampling;
    arena *a = &q->a;
    *s = r->sampling;
    q->n_prompt = n_prompt, q->n = q->n_live = MAX(r->n, 1), q->priority = r->priority;
    q->class_key = r->length_class, q->ids_only = r->ids_only, q->keep_special = r->keep_special;
    q->scores = r->prompt_logprobs, q->score_only = !r->n, q->scoring.logprobs = r->prompt_top;
    q->prompt = eng_copy(a, prompt, (size_t)n_prompt * sizeof *prompt);
    q->ended = arena_zalloc(a, (size_t)q->n);
    s->stop_ids = eng_copy(a, s->stop_ids, (size_t)s->n_stop_ids * sizeof *s->stop_ids);
    s->bias_ids = eng_copy(a, s->bias_ids, (size_t)s->n_bias * sizeof *s->bias_ids);
    s->bias_values = eng_copy(a, s->bias_values, (size_t)s->n_bias * sizeof *s->bias_values);
    s->allowed_ids = eng_copy(a, s->allowed_ids, (size_t)s->n_allowed * sizeof *s->allowed_ids);
    int n_bad_ids = 0;
    for (int i = 0; i < s->n_bad; i++) n_bad_ids += s->bad_lengths[i];
    s->bad_ids = eng_copy(a, s->bad_ids, (size_t)n_bad_ids * sizeof *s->bad_ids);
    s->bad_lengths = eng_copy(a, s->bad_lengths, (size_t)s->n_bad * sizeof *s->bad_lengths);
    const char **stop = s->n_stop ? arena_alloc(a, (size_t)s->n_stop * sizeof *stop) : NULL;
    for (int i = 0; i < s->n_stop; i++) stop[i] = arena_cstr(a, str_c(s->stop[i]));
    s->stop = stop;
    if (!s->max_tokens || s->max_tokens > g->max_len - n_prompt) s->max_tokens = g->max_len - n_prompt;
    if (q->score_only) s->max_tokens = 1, s->n_stop = 0;
    for (int i = 0; i < g->files->n_eos_ids && !s->ignore_eos; i++) ids_push(&q->ends, g->files->eos_ids[i]);
    for (int i = 0; i < s->n_stop_ids; i++) ids_push(&q->ends, s->stop_ids[i]);
    q->t_submit = os_now();
    q->usage.prompt_tokens = n_prompt;
    return q;
}

static int eng_check_prompt(int V, int max_len, const int32_t *prompt, size_t n, int need, toka_err *e) {
    if (!n) return fail(e, TOKA_E_USE, "the prompt has no tokens");
    if (n + (size_t)need > (size_t)max_len)
        return fail(e, TOKA_E_USE, "the prompt has %zu tokens; at most %d fit (max_model_len %d)", n, max_len - need, max_len);
    for (size_t i = 0; i < n; i++)
        if (prompt[i] < 0 || prompt[i] >= V)
            return fail(e, TOKA_E_USE, "token %zu of the prompt is %d, the vocabulary has %d", i, (int)prompt[i], V);
    return 0;
}

/* All that can be wrong with a request itself, for a vocabulary of V ids and sequences of max_len tokens. */
static int eng_check(int V, int max_len, bool has_tok, const toka_request *r, const int32_t *prompt, size_t n_prompt,
                     toka_err *e) {
    const toka_sampling *s = &r->sampling;
    int code = eng_check_prompt(V, max_len, prompt, n_prompt, r->n != 0, e);
    if (code || (code = samp_check(s, V, e))) return code;
    if (r->n < !r->prompt_logprobs || r->n > ENG_MAX_N) return fail(e, TOKA_E_USE, "n is %d, expected 1 to %d", r->n, ENG_MAX_N);
    if (samp_check_int("prompt_logprobs", r->prompt_top, 0, TOKA_MAX_LOGPROBS, e)) return e->code;
    if (s->n_stop && !has_tok) return fail(e, TOKA_E_USE, "stop strings need a tokenizer, this model has none");
    return 0;
}

/* Queues a request; everything is copied. done: set to true, under the lock, behind its last event. */
static int eng_submit(eng *g, const toka_request *r, const int32_t *prompt, size_t n_prompt, toka_event_fn *fn, void *user,
                      eng_request **out, bool *done, int64_t *id, toka_err *e) {
    int code = eng_check(g->files->shape.V, g->max_len, g->tok != NULL, r, prompt, n_prompt, e);
    if (code) return code;
    eng_request *q = eng_request_new(g, r, prompt, (int)n_prompt);
    q->fn = fn, q->user = user, q->done = done;
    pthread_mutex_lock(&g->lock);
    if ((code = g->broken.code)) *e = g->broken;
    else if (g->n_samples + q->n > ENG_MAX_SAMPLES)
        code = fail(e, TOKA_E_USE, "%lld samples are waiting or running, at most %d may be", (long long)g->n_samples, ENG_MAX_SAMPLES);
    else {
        q->id = *id = ++g->next_id;
        g->n_samples += q->n;
        *g->inbox_end = q, g->inbox_end = &q->next;
        g->shown.waiting += q->n;
        pthread_cond_broadcast(&g->wake);
    }
    pthread_mutex_unlock(&g->lock);
    if (code) eng_request_free(q);
    else if (out) *out = q;
    return code;
}

static void eng_cancel(eng *g, int64_t id) {
    pthread_mutex_lock(&g->lock);
    if (id > 0 && id <= g->next_id && g->n_samples) {
        if (g->n_cancels == g->cap_cancels) {
            g->cap_cancels = MAX(16, 2 * g->cap_cancels);
            g->cancels = mem_realloc(g->cancels, (size_t)g->cap_cancels * sizeof *g->cancels);
        }
        g->cancels[g->n_cancels++] = id;
    }
    pthread_cond_broadcast(&g->wake);
    pthread_mutex_unlock(&g->lock);
}

/* ---- Ends ---- */

static void eng_slot_close(eng_replica *p, int q) {
    eng_slot *slot = &p->slots[q];
    if (!slot->open) return;
    stop_free(&slot->stop);
    if (p->g->tok) tok_stream_free(&slot->stream);
    *slot = (eng_slot){0};
}

/* Nothing points to r any more. */
static void eng_release(eng *g, eng_request *r) {
    bool awaited = r->done != NULL; /* the one who waits for it frees it, maybe at once */
    pthread_mutex_lock(&g->lock);
    if (awaited) *r->done = true;
    g->n_samples -= r->n, g->shown.requests_done = g->stats.requests_done;
    pthread_cond_broadcast(&g->wake);
    pthread_mutex_unlock(&g->lock);
    if (!awaited) eng_request_free(r);
}

/* All events of r were delivered. */
static void eng_finish(eng *g, eng_request *r) {
    eng_replica *p = r->home;
    if (p) p->by_sched[r->sched_id] = NULL, p->work -= r->work, p->n_live--, g->n_busy--;
    g->stats.requests_done++;
    r->over = true;
    if (!r->n_flying) eng_release(g, r);
}

/* Ends every sample that has not ended: cancelled, or failed with the device. */
static void eng_end_all(eng *g, eng_request *r, toka_finish how) {
    eng_replica *p = r->home;
    if (p) {
        for (int q = 0; q < p->s.c.max_seqs; q++)
            if (p->s.seqs[q].state != SCHED_FREE && p->s.seqs[q].request == r->sched_id) eng_slot_close(p, q);
        sched_cancel(&p->s, r->sched_id);
    }
    int left = r->n_live;
    toka_event ev = {.id = -1, .text = r->ids_only ? NULL : "", .finish = how, .stop_id = -1, .stop_text = -1};
    for (int i = 0; i < r->n && r->fn; i++) {
        if (r->ended[i]) continue;
        ev.sample = r->score_only ? TOKA_PROMPT : i, ev.more = --left > 0;
        r->fn(r->user, &ev);
    }
    eng_finish(g, r);
}

/* ---- Take: the inbox to the scheduler ---- */

/* Tokens that a sample of r will yet have, as far as p has seen such. */
static double eng_expect(eng_replica *p, const eng_request *r) {
    bool exact = r->score_only || (!r->ends.n && !r->sampling.n_stop);
    return exact ? r->sampling.max_tokens : MIN(r->sampling.max_tokens, pred_length(&p->s.pred, (pred_of){-1, 0}, 0.5));
}

static int eng_alone(const eng *g, const eng_request *r) { /* samples that share no pages */
    return g->no_sharing ? r->n : r->scores;
}

/* Chooses a home for r and counts its work there. */
static void eng_route(eng *g, eng_request *r) {
    double least = INFINITY;
    int alone = eng_alone(g, r);
    for (int i = 0; i < g->n_replicas; i++) {
        eng_replica *p = &g->replicas[i];
        int found = g->n_replicas > 1 && alone < r->n ? kv_match(&p->s.kv, NULL, r->prompt, r->n_prompt) * p->s.c.B : 0;
        double prompt = alone * (double)r->n_prompt + (alone < r->n ? r->n_prompt - found : 0);
        double work = r->n * eng_expect(p, r) + prompt;
        if (p->work + work >= least) continue;
        least = p->work + work;
        r->home = p, r->work = work, r->work_each = work / r->n;
    }
    r->home->work += r->work, r->home->n_live++, g->n_busy++;
}

static void eng_enter(eng *g, eng_request *r) {
    const toka_sampling *s = &r->sampling;
    toka_err e;
    eng_route(g, r);
    eng_replica *p = r->home;
    int n_fed = r->score_only && r->n_prompt > 1 ? r->n_prompt - 1 : r->n_prompt; /* nothing comes behind the last token */
    r->sched_id = sched_submit(&p->s, &(sched_job){.prompt = r->prompt, .n_prompt = n_fed, .n = r->n, .max_tokens = s->max_tokens,
                                                   .min_tokens = s->min_tokens, .exact = r->score_only || (!r->ends.n && !s->n_stop),
                                                   .waits = samp_needs_history(s), .n_alone = eng_alone(g, r),
                                                   .priority = r->priority, .class_key = r->class_key}, &e);
    assert(r->sched_id >= 0); /* eng_check looked at the same limits */
    if (r->sched_id >= p->cap_by_sched) {
        int cap = MAX(64, 2 * (r->sched_id + 1));
        p->by_sched = mem_realloc(p->by_sched, (size_t)cap * sizeof *p->by_sched);
        memset(p->by_sched + p->cap_by_sched, 0, (size_t)(cap - p->cap_by_sched) * sizeof *p->by_sched);
        p->cap_by_sched = cap;
    }
    p->by_sched[r->sched_id] = r;
}

static int eng_by_id(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void eng_take(eng *g) {
    pthread_mutex_lock(&g->lock);
    eng_request *r = g->inbox;
    int64_t *cancels = g->cancels;
    size_t n_cancels = (size_t)g->n_cancels;
    g->inbox = NULL, g->inbox_end = &g->inbox;
    g->cancels = NULL, g->n_cancels = g->cap_cancels = 0;
    pthread_mutex_unlock(&g->lock);
    for (eng_request *next; r; r = next) next = r->next, eng_enter(g, r);
    if (n_cancels) qsort(cancels, n_cancels, sizeof *cancels, eng_by_id);
    for (int i = 0; i < g->n_replicas && n_cancels; i++) {
        eng_replica *p = &g->replicas[i];
        for (int k = 0; k < p->cap_by_sched; k++) {
            eng_request *q = p->by_sched[k];
            if (q && bsearch(&q->id, cancels, n_cancels, sizeof *cancels, eng_by_id)) eng_end_all(g, q, TOKA_CANCELLED);
        }
    }
    free(cancels);
}

/* ---- One step ---- */

/* What a row looks at beside its logits: ids that end sequence x too early, those that complete a bad word, and, for penalties,
 * all its tokens. f->known has room. */
static void eng_known(eng_flight *f, const eng_request *r, const sched_seq *x, toka_out_row *row) {
    ids *k = &f->known;
    bool early = x->n_planned - 1 - x->n_prompt < r->sampling.min_tokens;
    row->forbidden = r->ends.p, row->n_forbidden = early ? (int)r->ends.n : 0;
    if (r->sampling.n_bad) {
        size_t from = k->n;
        for (int i = 0; i < row->n_forbidden; i++) ids_push(k, r->ends.p[i]);
        samp_bad_ids(&r->sampling, x->tokens + x->n_prompt, x->n_known - x->n_prompt, k);
        row->forbidden = k->p + from, row->n_forbidden = (int)(k->n - from);
    }
    if (samp_has_penalties(&r->sampling)) {
        row->history = memcpy(k->p + k->n, x->tokens, (size_t)x->n_known * sizeof *k->p);
        row->n_history = x->n_known, k->n += (size_t)x->n_known;
    }
}

static void eng_known_room(eng_replica *p, eng_flight *f) {
    size_t room = 0;
    for (int i = 0; i < f->b.n_out; i++) {
        const sched_seq *x = &p->s.seqs[f->b.outs[i].q];
        const eng_request *r = p->by_sched[x->request];
        if (x->waits) room += (size_t)r->sampling.n_bad + r->ends.n + (size_t)x->n_known;
    }
    f->known.n = 0, ids_reserve(&f->known, room);
}

/* The rows of prompts whose logits are wanted, behind the first n rows of f->out. The last row of a prompt is not among them:
 * what it yields is a token of the sample, or, if the sample is none, forced to be the prompt's last. */
static int eng_places(eng_replica *p, eng_flight *f, int n) {
    int row0 = 0;
    f->n_places = 0;
    for (int k = 0; k < f->b.n_seq; row0 += p->s.seqs[f->b.seq[k++]].n_rows) {
        const sched_seq *x = &p->s.seqs[f->b.seq[k]];
        eng_request *r = p->by_sched[x->request];
        if (!r->scores || x->sample || !x->is_chunk) continue;
        int end = MIN(x->from + x->n_rows, x->n_prompt - 1);
        for (int at = MAX(x->from, r->n_scored - 1); at < end; at++) {
            f->places[f->n_places++] = (eng_place){f->b.seq[k], at + 1, x->ticket};
            f->whose[n] = r, r->n_flying++;
            f->out[n++] = (toka_out_row){.row = row0 + at - x->from, .slot = -1, .forced_id = r->prompt[at + 1], .sampling = &r->scoring};
        }
    }
    return n;
}

/* The rows whose logits are wanted, from the batch's list of rows that yield a token. */
static void eng_rows(eng_replica *p, eng_flight *f) {
    eng_known_room(p, f);
    for (int i = 0; i < f->b.n_out; i++) {
        const batch_out *o = &f->b.outs[i];
        const sched_seq *x = &p->s.seqs[o->q];
        eng_request *r = p->by_sched[x->request];
        f->out[i] = (toka_out_row){.row = o->row,
                                   .slot = o->q,
                                   .forced_id = r->score_only ? r->prompt[r->n_prompt - 1] : -1,
                                   .sample = (uint32_t)x->sample,
                                   .position = (uint32_t)x->n_planned - 1,
                                   .sampling = r->score_only ? &r->scoring : &r->sampling,
                                   .n_prompt = x->n_prompt};
        f->whose[i] = r, r->n_flying++;
        if (!r->score_only) eng_known(f, r, x, &f->out[i]);
    }
    f->b.step.out = f->out, f->b.step.n_out = eng_places(p, f, f->b.n_out);
}

static bool eng_is_end(const eng_request *r, int32_t id) {
    for (size_t i = 0; i < r->ends.n; i++)
        if (r->ends.p[i] == id) return true;
    return false;
}

/* Text of a new token into g->text, held back while it may begin a stop string. True: a stop string is complete. */
static bool eng_text(eng_replica *p, int q, const eng_request *r, int32_t id, bool is_end, bool armed, bool last) {
    eng *g = p->g;
    eng_slot *slot = &p->slots[q];
    buf_clear(&g->text), buf_clear(&g->piece);
    if (!g->tok || (r->ids_only && !r->sampling.n_stop)) return false;
    if (!slot->open) {
        stop_init(&slot->stop, r->sampling.stop, r->sampling.n_stop, r->sampling.include_stop);
        tok_stream_init(&slot->stream, g->tok, r->keep_special ? 0 : TOKA_SKIP_SPECIAL);
        tok_stream_follow(&slot->stream, r->prompt[r->n_prompt - 1]);
        slot->open = true;
    }
    if (!is_end) tok_stream_put(&slot->stream, id, &g->piece);
    if (last || is_end) tok_stream_end(&slot->stream, &g->piece);
    bool stopped = stop_put(&slot->stop, buf_view(&g->piece), armed, &g->text);
    if (!stopped && (last || is_end)) stop_end(&slot->stop, &g->text);
    return stopped;
}

/* The event for token number `at` of a prompt; before the second one that of the first, which has no logits. The last of a
 * request without samples ends it. False: the callback wants no more. */
static bool eng_deliver_prompt(eng_request *r, int at, const toka_pick *pick, bool more, toka_finish finish) {
    toka_event ev = {.sample = TOKA_PROMPT, .id = r->prompt[0], .stop_id = -1, .stop_text = -1, .more = 1};
    bool go_on = true;
    if (at == 1) go_on = !r->fn || !r->fn(r->user, &ev);
    if (at > 0) {
        ev.id = pick->id, ev.logprob = pick->logprob, ev.sampled_logprob = pick->sampled_logprob;
        ev.n_top = pick->n_top, ev.top_ids = pick->top_ids, ev.top_logprobs = pick->top_logprobs;
    }
    ev.more = more, ev.finish = finish;
    r->n_scored = at + 1;
    if (!go_on && finish == TOKA_RUNNING) return false;
    return !r->fn || !r->fn(r->user, &ev);
}

/* Does an event of r's come right behind that of yielding row i? */
static bool eng_more(const eng_replica *p, const eng_flight *f, const eng_request *r, int i) {
    for (i++; i < f->b.n_out; i++)
        if (p->s.seqs[f->b.outs[i].q].ticket == f->b.outs[i].ticket) return f->whose[i] == r;
    return false;
}

static void eng_sample_over(eng_replica *p, eng_request *r) {
    r->n_live--, r->work -= r->work_each, p->work -= r->work_each;
}

/* One pick becomes a token of its sequence and an event. False: the callback wants no more of this request. */
static bool eng_deliver(eng_replica *p, eng_request *r, int q, const toka_pick *pick, bool more, bool *ended) {
    eng *g = p->g;
    const sched_seq *x = &p->s.seqs[q];
    const toka_sampling *s = &r->sampling;
    bool armed = x->n_known + 1 - x->n_prompt >= s->min_tokens, full = x->n_known + 1 == x->limit;
    bool is_end = eng_is_end(r, pick->id), stopped = eng_text(p, q, r, pick->id, is_end, armed, full);
    toka_event ev = {.sample = x->sample,
                     .id = pick->id,
                     .logprob = pick->logprob,
                     .sampled_logprob = pick->sampled_logprob,
                     .n_top = pick->n_top,
                     .top_ids = pick->top_ids,
                     .top_logprobs = pick->top_logprobs,
                     .text = r->ids_only && !s->n_stop ? NULL : buf_view(&g->text).p,
                     .text_bytes = g->text.n,
                     .finish = is_end || stopped ? TOKA_STOP : full ? TOKA_LENGTH : TOKA_RUNNING,
                     .stop_id = is_end ? pick->id : -1,
                     .stop_text = stopped ? p->slots[q].stop.which : -1,
                     .n_cached = x->n_found,
                     .more = more};
    *ended = is_end || stopped;
    if (ev.finish != TOKA_RUNNING) r->ended[x->sample] = true, eng_sample_over(p, r), eng_slot_close(p, q);
    r->usage.output_tokens++;
    if (!r->t_first) r->t_first = os_now();
    return !r->fn || !r->fn(r->user, &ev);
}

static void eng_commit_places(eng_replica *p, const eng_flight *f) {
    for (int i = 0; i < f->n_places; i++) {
        const eng_place *at = &f->places[i];
        if (p->s.seqs[at->q].ticket != at->ticket) continue; /* it ended meanwhile, or in this very loop by a callback */
        eng_request *r = f->whose[f->b.n_out + i];
        bool more = i + 1 < f->n_places && f->places[i + 1].q == at->q;
        if (!eng_deliver_prompt(r, at->at, &f->picks[f->b.n_out + i], more, TOKA_RUNNING)) eng_end_all(p->g, r, TOKA_CANCELLED);
    }
}

static void eng_commit(eng_replica *p, const eng_flight *f) {
    eng_commit_places(p, f);
    for (int i = 0; i < f->b.n_out; i++) {
        const batch_out o = f->b.outs[i];
        if (p->s.seqs[o.q].ticket != o.ticket) continue;
        eng_request *r = f->whose[i];
        bool ended = true, more = true;
        if (r->scores && !r->score_only && !r->n_scored && !p->s.seqs[o.q].sample && /* a prompt of one token has no place but this */
            !eng_deliver_prompt(r, 0, NULL, true, TOKA_RUNNING)) {
            eng_end_all(p->g, r, TOKA_CANCELLED);
            continue;
        }
        if (!r->score_only) {
            more = eng_deliver(p, r, o.q, &f->picks[i], eng_more(p, f, r, i), &ended);
        } else {
            r->ended[0] = true, eng_sample_over(p, r);
            eng_deliver_prompt(r, r->n_prompt - 1, &f->picks[i], false, TOKA_LENGTH);
        }
        sched_commit(&p->s, o.q, o.ticket, f->picks[i].id, ended);
        if (!r->n_live) eng_finish(p->g, r);
        else if (!more) eng_end_all(p->g, r, TOKA_CANCELLED);
    }
}

/* What the rows of a step attend to, all and in spans that several sequences share (the first of the batch). */
static void eng_count_spans(eng *g, const batch_step *b) {
    for (int i = 0; i < b->step.n_spans; i++) {
        int64_t pairs = (int64_t)b->spans[i].n_rows * b->spans[i].n_kv;
        g->stats.attended += pairs;
        if (i < b->step.n_spans - b->n_seq) g->stats.attended_shared += pairs;
    }
}

/* Brings the statistics that others see up to date. */
static void eng_show(eng *g) {
    toka_stats *s = &g->stats;
    s->run_s = 0, s->running = s->waiting = 0, s->prompt_tokens = s->prompt_tokens_shared = s->preemptions = 0, s->kv_pages_used = 0;
    for (int i = 0; i < g->n_replicas; i++) {
        eng_replica *p = &g->replicas[i];
        s->run_s += model_busy(&p->m) / g->n_replicas;
        s->running += p->s.n_running, s->waiting += p->s.n_waiting;
        s->prompt_tokens += p->s.n_prompt_tokens, s->prompt_tokens_shared += p->s.n_prompt_hits;
        s->preemptions += p->s.n_preempted;
        s->kv_pages_used += p->s.c.n_pages - kv_room(&p->s.kv);
    }
    pthread_mutex_lock(&g->lock);
    g->shown = *s;
    for (const eng_request *r = g->inbox; r; r = r->next) g->shown.waiting += r->n;
    pthread_mutex_unlock(&g->lock);
}

/* The oldest step has come down: its rows let go of their requests. */
static void eng_land(eng_replica *p) {
    eng_flight *f = &p->flights[p->first];
    for (int i = 0; i < f->b.step.n_out; i++)
        if (!--f->whose[i]->n_flying && f->whose[i]->over) eng_release(p->g, f->whose[i]);
    p->first = (p->first + 1) % p->n_ahead, p->n_flying--, p->g->n_busy--;
}

/* Ends all that is under way. What steps that fly will bring means nothing any more. */
static void eng_end_everything(eng *g, toka_finish how) {
    toka_err e;
    eng_take(g);
    for (int i = 0; i < g->n_replicas; i++) {
        eng_replica *p = &g->replicas[i];
        for (; p->n_flying; eng_land(p)) model_wait(&p->m, p->flights[p->first].number, &e);
        for (int k = 0; k < p->cap_by_sched; k++)
            if (p->by_sched[k]) eng_end_all(g, p->by_sched[k], how);
    }
}

/* A device that failed fails every request; nothing more is taken. */
static void eng_break(eng *g, const toka_err *e) {
    pthread_mutex_lock(&g->lock);
    g->broken = *e;
    pthread_mutex_unlock(&g->lock);
    eng_end_everything(g, TOKA_FAILED);
    eng_show(g);
}

/* What is under way gets its last events, TOKA_CANCELLED, on this thread. False: a rank is lost, which may look at the weights. */
static bool eng_close(eng *g) {
    if (!g) return true;
    eng_end_everything(g, TOKA_CANCELLED);
    return eng_free(g);
}

/* For stages: the step's number, and that of the step whose draws it may have to wait for. */
static void eng_number(eng_replica *p, toka_step *s) {
    s->number = p->m.posted + 1, s->needs = p->drawn;
    if (s->n_out) p->drawn = s->number;
}

/* Plans a step and posts it. False: nothing can run before a step that flies has landed. */
static bool eng_plan(eng_replica *p) {
    eng_flight *f = &p->flights[(p->first + p->n_flying) % p->n_ahead];
    double t0 = os_now();
    int rows = sched_plan(&p->s);
    if (rows) {
        batch_build(&p->b, &f->b, &p->s);
        eng_rows(p, f);
        eng_number(p, &f->b.step);
        f->number = model_post(&p->m, &f->b.step, f->picks);
        p->n_flying++, p->g->n_busy++;
        eng_count_spans(p->g, &f->b);
    }
    p->g->stats.plan_s += os_now() - t0;
    return rows > 0;
}

/* The tokens that a step brings, also those of samples that a callback will end while it is committed. */
static void eng_count_picks(eng_replica *p, const eng_flight *f) {
    for (int i = 0; i < f->b.n_out; i++)
        p->g->stats.output_tokens += p->s.seqs[f->b.outs[i].q].ticket == f->b.outs[i].ticket && !f->whose[i]->score_only;
}

/* Commits the oldest step, which is done. */
static void eng_fetch(eng_replica *p) {
    eng *g = p->g;
    const eng_flight *f = &p->flights[p->first];
    toka_err e;
    if (model_wait(&p->m, f->number, &e)) {
        eng_break(g, &e);
        return;
    }
    double t0 = os_now();
    g->stats.steps++, g->stats.rows += f->b.step.T;
    eng_count_picks(p, f);
    eng_show(g); /* before its events: who has a token finds it counted */
    eng_commit(p, f);
    eng_land(p);
    g->stats.commit_s += os_now() - t0;
    eng_show(g);
}

/* A replica whose oldest step is done; waits for one if steps fly, else NULL. */
static eng_replica *eng_landing(eng *g) {
    eng_replica *found = NULL;
    bool flying = true;
    pthread_mutex_lock(&g->bell.lock);
    while (!found && flying) {
        flying = false;
        for (int i = 0; i < g->n_replicas && !found; i++) {
            eng_replica *p = &g->replicas[i];
            flying |= p->n_flying > 0;
            if (p->n_flying && model_is_done(&p->m, p->flights[p->first].number)) found = p;
        }
        if (!found && flying) pthread_cond_wait(&g->bell.done, &g->bell.lock);
    }
    pthread_mutex_unlock(&g->bell.lock);
    return found;
}

/* Fills the replicas with steps, then commits one. */
static void eng_step(eng *g) {
    eng_take(g);
    for (int i = 0; i < g->n_replicas; i++)
        for (eng_replica *p = &g->replicas[i]; p->n_live && p->n_flying < p->n_ahead && eng_plan(p);) {}
    eng_replica *p = eng_landing(g);
    if (p) eng_fetch(p);
    else eng_show(g); /* all that was there was cancelled */
}

/* ---- Drive ---- */

/* Runs steps until *done (if not NULL); or, forever, until eng_stop; or until nothing is left. While another thread drives, waits.
 * Nobody leaves a broken engine before the driver has delivered the last event. */
static int eng_drive(eng *g, const bool *done, bool forever, toka_err *e) {
    pthread_mutex_lock(&g->lock);
    while (!(done && *done)) {
        bool idle = !g->driven && !g->n_busy && !g->inbox && !g->n_cancels;
        if (!g->driven && !done && (g->broken.code || (forever ? g->stopping : idle))) break;
        if (g->driven || idle) {
            pthread_cond_wait(&g->wake, &g->lock);
            continue;
        }
        g->driven = true;
        pthread_mutex_unlock(&g->lock);
        eng_step(g);
        pthread_mutex_lock(&g->lock);
        g->driven = false;
        pthread_cond_broadcast(&g->wake);
    }
    int code = g->broken.code;
    if (code) *e = g->broken;
    pthread_mutex_unlock(&g->lock);
    return code;
}

static void eng_stop(eng *g) {
    pthread_mutex_lock(&g->lock);
    g->stopping = true;
    pthread_cond_broadcast(&g->wake);
    pthread_mutex_unlock(&g->lock);
}

/* Runs one request to its end. usage is filled also when it fails or is cancelled. */
static int eng_generate(eng *g, const toka_request *r, const int32_t *prompt, size_t n_prompt, toka_event_fn *fn, void *user,
                        toka_usage *usage, toka_err *e) {
    eng_request *q;
    bool done = false;
    int64_t id;
    int code = eng_submit(g, r, prompt, n_prompt, fn, user, &q, &done, &id, e);
    if (code) return code;
    code = eng_drive(g, &done, false, e);
    assert(done);
    *usage = q->usage;
    double now = os_now();
    usage->prefill_s = (q->t_first ? q->t_first : now) - q->t_submit, usage->decode_s = q->t_first ? now - q->t_first : 0;
    bool cancelled = q->n_live > 0;
    eng_request_free(q);
    if (!code && cancelled) return fail(e, TOKA_E_CANCELLED, "cancelled");
    return code;
}

/* ---- Score ---- */

typedef struct eng_scored {
    float *logprobs;
    size_t n;
} eng_scored;

static int eng_on_score(void *user, const toka_event *ev) {
    eng_scored *s = user;
    if (ev->id >= 0) s->logprobs[s->n++] = ev->logprob;
    return 0;
}

static int eng_score(eng *g, const int32_t *tokens, size_t n, float *logprobs, toka_err *e) {
    toka_request r = {.n = 0, .prompt_logprobs = 1, .sampling = {.top_p = 1, .repetition_penalty = 1}};
    eng_scored s = {logprobs, 0};
    toka_usage unused;
    return eng_generate(g, &r, tokens, n, eng_on_score, &s, &unused, e);
}

/* ===========================================================================
 * MARK: 19. Public API [os]
 * What toka.h declares, documented there. Thin: opens the parts in order, hands arguments to their chapters, and turns what is
 * owned inside into what the caller frees.
 * =========================================================================== */

struct toka {
    mf_model *files;
    toka_shape shape; /* the model's, with B and max_len as the engine set them */
    tok *tok;         /* NULL: the folder has no tokenizer.json */
    tmpl *chat;       /* NULL: no chat template */
    tmpl *tool_chat;  /* the model's template for chats with tools, NULL: it has none of its own */
    toka_err chat_error, tool_error; /* why the model's own templates could not be parsed; code 0: they could, or there is none */
    eng *engine;
};

#ifdef TOKA_EMBED /* a folder, given by build.sh: its files become part of the program */
#define EMBED(symbol, file) \
    __asm__(".section .rodata\n.balign 64\n" #symbol "_begin: .incbin \"" TOKA_EMBED "/" file "\"\n" #symbol "_end: .byte 0\n" \
            ".text\n"); \
    extern const char symbol##_begin[] __attribute__((visibility("hidden"))); \
    extern const char symbol##_end[] __attribute__((visibility("hidden")));
EMBED(embed_config, "config.json")
EMBED(embed_generation, "generation_config.json")
EMBED(embed_tokenizer, "tokenizer.json")
EMBED(embed_tokenizer_config, "tokenizer_config.json")
EMBED(embed_weights, "model.safetensors")
static const mf_embedded embedded_files[] = {{"config.json", embed_config_begin, embed_config_end},
                                             {"generation_config.json", embed_generation_begin, embed_generation_end},
                                             {"tokenizer.json", embed_tokenizer_begin, embed_tokenizer_end},
                                             {"tokenizer_config.json", embed_tokenizer_config_begin, embed_tokenizer_config_end},
                                             {"model.safetensors", embed_weights_begin, embed_weights_end},
                                             {NULL, NULL, NULL}};
static const mf_embedded *const embedded_model = embedded_files;
#else
static const mf_embedded *const embedded_model = NULL;
#endif

toka_options toka_options_default(void) { return (toka_options){.device = "auto"}; }

/* Parses a template file: Jinja, or a tokenizer_config.json (by its name) that has a template in it. `names` gets the special
 * tokens of the latter, for a template without a model. */
static int pub_template_file(const char *file, mf_model *names, tmpl **out, toka_err *e) {
    str source;
    int code = os_map(file, &source, e);
    if (code) return code;
    bool config = str_ends(str_c(file), STR(".json"));
    if (config) code = mf_tokenizer_config_parse(source, file, &names->a, names, e);
    if (!code && config && !names->chat_template.n) code = fail(e, TOKA_E_INPUT, "%s: there is no chat_template in it", file);
    if (!code) code = tmpl_parse(out, config ? names->chat_template : source, e);
    os_unmap(source);
    return code;
}

/* The chat template: a file of the user's, or the model's own. The model's may be beyond us: that only matters to chats. */
static int pub_open_template(toka *t, const char *file, toka_err *e) {
    mf_model names = {0}; /* the model's own names count */
    if (!file) {
        if (t->files->chat_template.n) tmpl_parse(&t->chat, t->files->chat_template, &t->chat_error);
        if (t->files->tool_template.n) tmpl_parse(&t->tool_chat, t->files->tool_template, &t->tool_error);
        return 0;
    }
    int code = pub_template_file(file, &names, &t->chat, e);
    arena_free(&names.a);
    return code;
}

static int pub_need_template(const toka *t, toka_err *e) {
    if (t->chat) return 0;
    if (t->chat_error.code)
        return fail(e, TOKA_E_INPUT, "the chat template of %s cannot be used: %.350s", t->files->name, t->chat_error.msg);
    return fail(e, TOKA_E_USE, "%s has no chat template; give one with --chat-template or use --raw", t->files->name);
}

/* The text half of a model: files, tokenizer, template; its weights only if asked for. Takes no memory for running. */
static int pub_open_text(toka **out, const toka_options *o, bool weights, toka_err *e) {
    toka *t = mem_zalloc(sizeof *t);
    int code = (weights ? mf_open : mf_open_text)(&t->files, o->model, o->models_file, o->model ? NULL : embedded_model, e);
    if (!code && t->files->tokenizer_json.n) code = tok_load(&t->tok, t->files->tokenizer_json, t->files->tokenizer_config, e);
    if (!code) code = pub_open_template(t, o->chat_template, e);
    if (code) {
        toka_close(t);
        return code;
    }
    t->shape = t->files->shape;
    *out = t;
    return 0;
}

#ifdef TOKA_WITH_CUDA
static const toka_backend *const pub_backends[] = {&toka_cuda, &toka_cpu};
static const char pub_devices[] = "cuda and cpu";
#else
static const toka_backend *const pub_backends[] = {&toka_cpu};
static const char pub_devices[] = "cpu";
#endif

/* "auto" is the first that has a device, in the end the CPU; NULL: this build does not know the name. */
static const toka_backend *pub_backend(const char *device) {
    char line[200];
    if (!device || !strcmp(device, "auto")) {
        for (int i = 0; i < COUNT(pub_backends) - 1; i++)
            if (pub_backends[i]->probe(0, line, sizeof line)) return pub_backends[i];
        return pub_backends[COUNT(pub_backends) - 1];
    }
    for (int i = 0; i < COUNT(pub_backends); i++)
        if (!strcmp(device, pub_backends[i]->name)) return pub_backends[i];
    return NULL;
}

static int pub_check_options(const toka_options *o, toka_err *e) {
    if (!o->model && !embedded_model) return fail(e, TOKA_E_USE, "no model given, and none is embedded in this build");
    char line[200];
    const toka_backend *be = pub_backend(o->device);
    if (!be) return fail(e, TOKA_E_USE, "device %s: this build has auto, %s", o->device, pub_devices);
    if (!be->probe(0, line, sizeof line)) return fail(e, TOKA_E_DEVICE, "device %s: %s", be->name, line);
    if (o->n_threads < 0 || o->n_threads > 1024) return fail(e, TOKA_E_USE, "threads: %d, expected 0 to 1024", o->n_threads);
    if (o->max_model_len < 0) return fail(e, TOKA_E_USE, "max_model_len: %d, expected 0 or more", o->max_model_len);
    if (o->max_num_seqs < 0 || o->max_num_seqs > 65536)
        return fail(e, TOKA_E_USE, "max_num_seqs: %d, expected 0 to 65536", o->max_num_seqs);
    if (!(o->gpu_memory_utilization >= 0 && o->gpu_memory_utilization <= 1))
        return fail(e, TOKA_E_USE, "gpu_memory_utilization: %g, expected 0 to 1", o->gpu_memory_utilization);
    if (o->data_parallel_size < 0 || o->data_parallel_size > ENG_MAX_SPLIT)
        return fail(e, TOKA_E_USE, "data_parallel_size: %d, expected 1 to %d", o->data_parallel_size, ENG_MAX_SPLIT);
    if (o->tensor_parallel_size < 0 || o->tensor_parallel_size > ENG_MAX_SPLIT)
        return fail(e, TOKA_E_USE, "tensor_parallel_size: %d, expected 1 to %d", o->tensor_parallel_size, ENG_MAX_SPLIT);
    if (o->pipeline_parallel_size < 0 || o->pipeline_parallel_size > ENG_MAX_SPLIT)
        return fail(e, TOKA_E_USE, "pipeline_parallel_size: %d, expected 1 to %d", o->pipeline_parallel_size, ENG_MAX_SPLIT);
    if (o->kv_tokens < 0) return fail(e, TOKA_E_USE, "kv_tokens: %lld, expected 0 or more", (long long)o->kv_tokens);
    if (o->max_num_batched_tokens < 0 || o->max_num_batched_tokens > 65536)
        return fail(e, TOKA_E_USE, "max_num_batched_tokens: %d, expected 0 to 65536", o->max_num_batched_tokens);
    return 0;
}

int toka_open(toka **out, const toka_options *o, toka_err *e) {
    toka *t;
    *out = NULL;
    int code = pub_check_options(o, e);
    if (code || (code = pub_open_text(&t, o, true, e))) return code;
    if ((code = eng_open(&t->engine, pub_backend(o->device), t->files, &t->shape, t->tok, o, e))) {
        toka_close(t);
        return code;
    }
    *out = t;
    return 0;
}

void toka_close(toka *t) {
    if (!t) return;
    bool done = eng_close(t->engine);
    tmpl_del(t->chat), tmpl_del(t->tool_chat);
    tok_del(t->tok);
    if (t->files && done) mf_close(t->files);
    free(t);
}

toka_info toka_get_info(const toka *t) {
    const toka_shape *s = &t->shape;
    return (toka_info){.model_name = t->files->name,
                       .architecture = t->files->architecture,
                       .device = t->engine ? t->engine->be->describe(t->engine->replicas[0].m.ranks[0].dev) : "none",
                       .n_parameters = t->files->n_parameters,
                       .n_layers = s->L,
                       .n_heads = s->H,
                       .n_kv_heads = s->K,
                       .head_size = s->D,
                       .width = s->E,
                       .mlp_width = s->F,
                       .vocab_size = s->V,
                       .max_model_len = s->max_len,
                       .bos_id = t->files->bos_id,
                       .eos_id = t->files->n_eos_ids ? t->files->eos_ids[0] : -1,
                       .has_chat_template = t->chat != NULL};
}

static int pub_need_tokenizer(const toka *t, toka_err *e) {
    if (t->tok) return 0;
    return fail(e, TOKA_E_INPUT, "%s: no tokenizer.json, so text cannot be read or written; use token ids", t->files->name);
}

int toka_encode(const toka *t, const char *text, size_t text_bytes, int flags, int32_t **out, size_t *n_ids, toka_err *e) {
    ids v = {0};
    int code = pub_need_tokenizer(t, e);
    if (!code) code = tok_encode(t->tok, (str){text, text_bytes}, flags, &v, e);
    if (code) {
        ids_free(&v);
        return code;
    }
    ids_reserve(&v, 1); /* never NULL */
    *out = v.p;
    *n_ids = v.n;
    return 0;
}

int toka_decode(const toka *t, const int32_t *in, size_t n_ids, int flags, char **text, size_t *text_bytes, toka_err *e) {
    buf b = {0};
    int code = pub_need_tokenizer(t, e);
    if (!code) code = tok_decode(t->tok, in, n_ids, flags, &b, e);
    if (code) {
        buf_free(&b);
        return code;
    }
    buf_put(&b, "", 0); /* never NULL */
    *text = b.p;
    *text_bytes = b.n;
    return 0;
}

/* "YYYY-MM-DD hh:mm:ss" or NULL for the local time now. */
static int pub_parse_now(const char *now, tmpl_time *out, toka_err *e) {
    struct tm tm = {0};
    char extra;
    if (!now) {
        time_t clock = time(NULL);
        localtime_r(&clock, &tm);
    } else {
        int n = sscanf(now, "%d-%d-%d %d:%d:%d%c", &tm.tm_year, &tm.tm_mon, &tm.tm_mday, &tm.tm_hour, &tm.tm_min, &tm.tm_sec, &extra);
        struct tm want = tm;
        tm.tm_year -= 1900, tm.tm_mon -= 1;
        struct tm made = tm;
        made.tm_isdst = -1;
        timegm(&made); /* brings what is out of range into range */
        if (n != 6 || want.tm_year < 1900 || want.tm_year > 9999 || made.tm_mday != tm.tm_mday ||
            made.tm_mon != tm.tm_mon || made.tm_hour != tm.tm_hour || made.tm_sec != tm.tm_sec)
            return fail(e, TOKA_E_USE, "now: '%s', expected 'YYYY-MM-DD hh:mm:ss'", now);
        tm = made; /* with weekday and day of the year */
    }
    *out = (tmpl_time){tm.tm_year, tm.tm_mon, tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec, tm.tm_wday, tm.tm_yday};
    return 0;
}

static void pub_put_token_variable(buf *b, const char *name, const char *value) {
    if (!value) return;
    json_put_key(b, name);
    json_put_str(b, str_c(value));
}

/* The caller's object behind what apply_chat_template always passes and the model's own variables (of equal names the last, the
 * caller's, wins). */
static int pub_template_context(const mf_model *files, str context, arena *a, buf *text, const json **out, toka_err *e) {
    const json *v = json_parse(a, context, json_trusted, e);
    if (!v) return e->code;
    if (v->type != JSON_OBJECT) return fail(e, TOKA_E_USE, "the template's input must be a JSON object with \"messages\"");
    json_put_open(text, '{');
    json_put_key(text, "tools"), json_put_null(text);
    json_put_key(text, "documents"), json_put_null(text);
    json_put_key(text, "add_generation_prompt"), json_put_bool(text, false);
    pub_put_token_variable(text, "bos_token", files->bos_token);
    pub_put_token_variable(text, "eos_token", files->eos_token);
    pub_put_token_variable(text, "pad_token", files->pad_token);
    pub_put_token_variable(text, "unk_token", files->unk_token);
    if (v->n) json_comma(text);
    size_t open = (size_t)str_find(context, STR("{"), 0) + 1;
    buf_str(text, str_sub(context, open, context.n));
    *out = json_parse(a, buf_view(text), json_trusted, e);
    return *out ? 0 : e->code;
}

/* t: the model of that template, whose other template renders chats with tools; NULL: the template stands alone. */
static int pub_render(const toka *t, const tmpl *chat, const mf_model *files, str context, const char *now, buf *out,
                      toka_err *e) {
    arena a = {0};
    buf text = {0};
    tmpl_time time = {0};
    const json *root = NULL;
    int code = pub_parse_now(now, &time, e);
    if (!code) code = pub_template_context(files, context, &a, &text, &root, e);
    const json *tools = code ? NULL : json_get(root, "tools");
    if (t && json_is(tools, JSON_ARRAY) && tools->n && (t->tool_chat || t->tool_error.code)) {
        chat = t->tool_chat;
        if (!chat)
            code = fail(e, TOKA_E_INPUT, "the tool_use template of %s cannot be used: %.350s", files->name, t->tool_error.msg);
    }
    if (!code) code = tmpl_render(chat, root, time, tmpl_default_limits, out, e);
    buf_free(&text);
    arena_free(&a);
    return code;
}

int toka_apply_chat_template(const toka *t, const char *context, size_t context_bytes, const char *now, char **text,
                             size_t *text_bytes, toka_err *e) {
    buf b = {0};
    if (pub_need_template(t, e)) return e->code;
    int code = pub_render(t, t->chat, t->files, (str){context, context_bytes}, now, &b, e);
    if (code) {
        buf_free(&b);
        return code;
    }
    buf_put(&b, "", 0);
    *text = b.p;
    *text_bytes = b.n;
    return 0;
}

toka_request toka_request_default(void) {
    return (toka_request){.text = "",
                          .text_flags = TOKA_ADD_SPECIAL | TOKA_PARSE_SPECIAL,
                          .n = 1,
                          .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1}};
}

void toka_request_model_defaults(const toka *t, toka_request *r) {
    if (!t) return;
    const mf_defaults *d = &t->files->defaults;
    if (d->has_temperature) r->sampling.temperature = d->temperature;
    if (d->has_do_sample && !d->do_sample) r->sampling.temperature = 0;
    if (d->has_top_p) r->sampling.top_p = d->top_p;
    if (d->has_top_k) r->sampling.top_k = d->top_k;
    if (d->has_min_p) r->sampling.min_p = d->min_p;
    if (d->has_repetition_penalty) r->sampling.repetition_penalty = d->repetition_penalty;
}

int toka_generate(toka *t, const toka_request *r, toka_event_fn *fn, void *user, toka_usage *usage, toka_err *e) {
    toka_usage unused;
    int32_t *prompt = NULL;
    size_t n = r->n_ids;
    int code = r->ids ? 0 : toka_encode(t, r->text, r->text_bytes, r->text_flags, &prompt, &n, e);
    if (!code) code = eng_generate(t->engine, r, r->ids ? r->ids : prompt, n, fn, user, usage ? usage : &unused, e);
    free(prompt);
    return code;
}

int toka_submit(toka *t, const toka_request *r, toka_event_fn *fn, void *user, int64_t *id, toka_err *e) {
    int32_t *prompt = NULL;
    size_t n = r->n_ids;
    int code = r->ids ? 0 : toka_encode(t, r->text, r->text_bytes, r->text_flags, &prompt, &n, e);
    if (!code) code = eng_submit(t->engine, r, r->ids ? r->ids : prompt, n, fn, user, NULL, NULL, id, e);
    free(prompt);
    return code;
}

void toka_cancel(toka *t, int64_t id) { eng_cancel(t->engine, id); }

int toka_run(toka *t, int forever, toka_err *e) { return eng_drive(t->engine, NULL, forever != 0, e); }

void toka_stop(toka *t) { eng_stop(t->engine); }

toka_stats toka_get_stats(toka *t) {
    pthread_mutex_lock(&t->engine->lock);
    toka_stats s = t->engine->shown;
    pthread_mutex_unlock(&t->engine->lock);
    return s;
}

int toka_score(toka *t, const int32_t *in, size_t n_ids, float *logprobs, toka_err *e) {
    return eng_score(t->engine, in, n_ids, logprobs, e);
}

/* ===========================================================================
 * MARK: 20. HTTP [pure]
 * HTTP/1.1 (RFC 9110, 9112) as bytes in, structs out, and back. No sockets, no clock.
 *
 * Reading is three-valued: > 0 bytes used, 0 need more, < 0 bad, and its negative is the status to answer. Slices borrow from
 * the input. What two parsers could read differently is refused, never repaired: bare line feeds, folded lines, white space
 * before a colon, Content-Length beside Transfer-Encoding or twice, codings other than one "chunked", sizes with signs or spaces.
 * That is what a proxy in front and the server behind would need to disagree on to smuggle a request past it.
 * =========================================================================== */

enum {
    HTTP_MAX_HEAD = 32 << 10,    /* bytes of a request line and its headers */
    HTTP_MAX_TARGET = 8 << 10,   /* bytes of a target */
    HTTP_MAX_HEADERS = 100,
    HTTP_MAX_CHUNK_LINE = 256,   /* bytes of a chunk's size line with its extensions */
    HTTP_MAX_CHUNK_EXTRA = 16 << 10, /* bytes of extensions and trailers of one body */
};

enum http_method { HTTP_GET, HTTP_HEAD, HTTP_POST, HTTP_DELETE, HTTP_OPTIONS, HTTP_OTHER };

typedef struct http_header { /* the name as sent, the value without white space around it */
    str name, value;
} http_header;

typedef struct http_request {
    enum http_method method;
    int minor;            /* HTTP/1.minor: 0 or 1 */
    str target;           /* as sent */
    str path, query;      /* of the target, still percent-encoded; the server decodes the path */
    http_header headers[HTTP_MAX_HEADERS];
    int n_headers;
    int64_t length;       /* of the body: Content-Length; 0: none */
    bool chunked;         /* the body's length is told by its chunks */
    bool keep_alive, expects_continue;
} http_request;

typedef struct http_reply { /* what a handler answers; zeroed by the caller */
    int status;
    const char *type;      /* Content-Type, NULL: application/json */
    buf headers;           /* further header lines, each "Name: value\r\n" */
    buf body;
    int fd;                /* instead of body, if fd_bytes > 0: a file to send from its start; closed when sent */
    int64_t fd_bytes;
} http_reply;

/* ---- Characters ---- */

static bool http_is_token(unsigned char c) { /* RFC 9110 5.6.2 */
    return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') || (c && strchr("!#$%&'*+-.^_`|~", c));
}

static int http_hex(char c) { /* -1: no hex digit */
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

static char http_lower(char c) { return c >= 'A' && c <= 'Z' ? (char)(c + 32) : c; }

static bool http_same(str a, const char *lower) { /* without regard to case */
    size_t n = strlen(lower);
    if (a.n != n) return false;
    for (size_t i = 0; i < n; i++)
        if (http_lower(a.p[i]) != lower[i]) return false;
    return true;
}

static str http_trim(str s) {
    while (s.n && (s.p[0] == ' ' || s.p[0] == '\t')) s.p++, s.n--;
    while (s.n && (s.p[s.n - 1] == ' ' || s.p[s.n - 1] == '\t')) s.n--;
    return s;
}

/* The next element of a comma-separated list; false at its end. */
static bool http_next(str *list, str *element) {
    if (!list->n) return false;
    ptrdiff_t comma = str_find(*list, STR(","), 0);
    size_t n = comma < 0 ? list->n : (size_t)comma;
    *element = http_trim(str_sub(*list, 0, n));
    *list = str_sub(*list, MIN(n + 1, list->n), list->n);
    return true;
}

/* Appends s with %xx decoded (plus: and '+' as a space, as in queries). False: a broken escape, or a zero byte. */
static bool http_decode(str s, bool plus, buf *out) {
    for (size_t i = 0; i < s.n; i++) {
        char c = s.p[i];
        if (c == '%') {
            int hi = i + 2 < s.n ? http_hex(s.p[i + 1]) : -1, lo = i + 2 < s.n ? http_hex(s.p[i + 2]) : -1;
            if (hi < 0 || lo < 0) return false;
            c = (char)(hi << 4 | lo);
            i += 2;
        } else if (c == '+' && plus) {
            c = ' ';
        }
        if (!c) return false;
        buf_char(out, c);
    }
    return true;
}

/* ---- The head of a request ---- */

/* A header's value without white space around it; .p NULL if it is absent. The first of several. */
static str http_find(const http_request *r, const char *lower) {
    for (int i = 0; i < r->n_headers; i++)
        if (http_same(r->headers[i].name, lower)) return r->headers[i].value;
    return (str){NULL, 0};
}

static int http_count(const http_request *r, const char *lower) {
    int n = 0;
    for (int i = 0; i < r->n_headers; i++) n += http_same(r->headers[i].name, lower);
    return n;
}

/* Appends the decoded value of a query's field. False: absent, or broken. */
static bool http_query(const http_request *r, const char *name, buf *out) {
    for (str rest = r->query; rest.n;) {
        ptrdiff_t amp = str_find(rest, STR("&"), 0);
        str field = str_sub(rest, 0, amp < 0 ? rest.n : (size_t)amp);
        rest = str_sub(rest, MIN(field.n + 1, rest.n), rest.n);
        ptrdiff_t eq = str_find(field, STR("="), 0);
        if (str_is(str_sub(field, 0, eq < 0 ? field.n : (size_t)eq), name))
            return http_decode(eq < 0 ? STR("") : str_sub(field, (size_t)eq + 1, field.n), true, out);
    }
    return false;
}

/* A line without its end. > 0 bytes used, 0 need more, -400: it does not end in CR LF. */
static ptrdiff_t http_line(str in, str *line) {
    const char *feed = in.n ? memchr(in.p, '\n', in.n) : NULL;
    if (!feed) return 0;
    size_t n = (size_t)(feed - in.p);
    if (!n || in.p[n - 1] != '\r') return -400;
    *line = str_sub(in, 0, n - 1);
    return (ptrdiff_t)n + 1;
}

static enum http_method http_parse_method(str s) {
    static const char *const names[] = {"GET", "HEAD", "POST", "DELETE", "OPTIONS"};
    for (int i = 0; i < COUNT(names); i++)
        if (str_is(s, names[i])) return (enum http_method)i;
    return HTTP_OTHER;
}

/* "HTTP/1.x"; 0, or the status to answer. */
static int http_parse_version(str s, int *minor) {
    bool form = s.n == 8 && str_starts(s, STR("HTTP/")) && s.p[6] == '.';
    if (!form || !isdigit((unsigned char)s.p[5]) || !isdigit((unsigned char)s.p[7])) return 400;
    if (s.p[5] != '1') return 505;
    *minor = s.p[7] > '0'; /* 1.2 and on would be answered as 1.1 */
    return 0;
}

/* Origin form "/path?query", absolute form "http://host/path?query", and "*" for OPTIONS. */
static int http_parse_target(http_request *r) {
    str t = r->target;
    if (t.n > HTTP_MAX_TARGET) return 414;
    for (size_t i = 0; i < t.n; i++)
        if ((unsigned char)t.p[i] <= ' ' || (unsigned char)t.p[i] >= 0x7F) return 400;
    size_t scheme = 0;
    if (http_same(str_sub(t, 0, MIN(t.n, (size_t)7)), "http://")) scheme = 7;
    if (http_same(str_sub(t, 0, MIN(t.n, (size_t)8)), "https://")) scheme = 8;
    if (scheme) {
        size_t at = scheme;
        while (at < t.n && t.p[at] != '/' && t.p[at] != '?') at++;
        if (at == scheme) return 400;
        t = at < t.n && t.p[at] == '/' ? str_sub(t, at, t.n) : STR("/");
    } else if (str_is(t, "*")) {
        if (r->method != HTTP_OPTIONS) return 400;
    } else if (!t.n || t.p[0] != '/') {
        return 400;
    }
    ptrdiff_t end = str_find(t, STR("#"), 0); /* no client should send a fragment */
    if (end >= 0) return 400;
    ptrdiff_t mark = str_find(t, STR("?"), 0);
    r->path = str_sub(t, 0, mark < 0 ? t.n : (size_t)mark);
    r->query = mark < 0 ? STR("") : str_sub(t, (size_t)mark + 1, t.n);
    return 0;
}

static int http_parse_request_line(str line, http_request *r) {
    ptrdiff_t a = str_find(line, STR(" "), 0), b = a < 0 ? -1 : str_find(line, STR(" "), (size_t)a + 1);
    size_t method = a < 0 ? line.n : (size_t)a;
    if (!method || method > 32) return 400;
    for (size_t i = 0; i < method; i++)
        if (!http_is_token((unsigned char)line.p[i])) return 400;
    if (b < 0) return 400;
    r->method = http_parse_method(str_sub(line, 0, method));
    r->target = str_sub(line, method + 1, (size_t)b);
    int code = http_parse_version(str_sub(line, (size_t)b + 1, line.n), &r->minor);
    return code ? code : http_parse_target(r);
}

static int http_parse_header(str line, http_header *h) {
    ptrdiff_t colon = str_find(line, STR(":"), 0);
    if (colon <= 0) return 400; /* also a folded line: it begins with white space, which is no token */
    *h = (http_header){str_sub(line, 0, (size_t)colon), http_trim(str_sub(line, (size_t)colon + 1, line.n))};
    for (size_t i = 0; i < h->name.n; i++)
        if (!http_is_token((unsigned char)h->name.p[i])) return 400;
    for (size_t i = 0; i < h->value.n; i++) {
        unsigned char c = (unsigned char)h->value.p[i];
        if ((c < ' ' && c != '\t') || c == 0x7F) return 400;
    }
    return 0;
}

static int http_check_length(http_request *r) {
    str v = http_find(r, "content-length");
    if (!v.p) return 0;
    if (!v.n || http_count(r, "content-length") > 1) return 400;
    for (size_t i = 0; i < v.n; i++)
        if (!isdigit((unsigned char)v.p[i])) return 400;
    if (v.n > 18) return 413;
    for (size_t i = 0; i < v.n; i++) r->length = r->length * 10 + (v.p[i] - '0');
    return 0;
}

static int http_check_coding(http_request *r) {
    str v = http_find(r, "transfer-encoding");
    if (!v.p) return 0;
    if (r->minor == 0 || http_find(r, "content-length").p || http_count(r, "transfer-encoding") > 1) return 400;
    if (!http_same(v, "chunked")) return str_find(v, STR(","), 0) >= 0 || !v.n ? 400 : 501;
    r->chunked = true;
    return 0;
}

static int http_check_host(const http_request *r) {
    int n = http_count(r, "host");
    if (n > 1 || (n == 0 && r->minor)) return 400;
    str v = http_find(r, "host");
    for (size_t i = 0; i < v.n; i++)
        if (!isalnum((unsigned char)v.p[i]) && !strchr("-._~%!$&'()*+,;=:[]", v.p[i])) return 400;
    return 0;
}

static int http_check_connection(http_request *r) {
    r->keep_alive = r->minor > 0;
    for (int i = 0; i < r->n_headers; i++) {
        str list = r->headers[i].value, word;
        if (!http_same(r->headers[i].name, "connection")) continue;
        while (http_next(&list, &word))
            if (http_same(word, "close")) return r->keep_alive = false, 0; /* goes before keep-alive */
            else if (http_same(word, "keep-alive")) r->keep_alive = true;
    }
    return 0;
}

static int http_check_expect(http_request *r) {
    str v = http_find(r, "expect");
    if (v.p && !http_same(v, "100-continue")) return 417;
    r->expects_continue = v.p && r->minor > 0;
    return 0;
}

/* Request line and headers up to the empty line. Empty lines before it are skipped (RFC 9112 2.2). Cost: linear in the bytes. */
static ptrdiff_t http_parse_head(str in, http_request *r) {
    str line = {0}, whole = str_sub(in, 0, MIN(in.n, (size_t)HTTP_MAX_HEAD));
    ptrdiff_t at = 0, used;
    int code = 0;
    *r = (http_request){0};
    while (at < 8 && (used = http_line(str_sub(whole, (size_t)at, whole.n), &line)) > 0 && !line.n) at += used;
    for (int n_lines = 0;; n_lines++) {
        used = http_line(str_sub(whole, (size_t)at, whole.n), &line);
        if (used < 0) return used;
        if (!used && !n_lines) { /* what cannot become a request line is answered at once: TLS, other protocols */
            size_t i = (size_t)at;
            while (i < whole.n && http_is_token((unsigned char)whole.p[i])) i++;
            if (i < whole.n && whole.p[i] != ' ' && whole.p[i] != '\r') return -400;
            if (i - (size_t)at > 32) return -400;
        }
        if (!used && !n_lines && whole.n - (size_t)at > HTTP_MAX_TARGET + 64) return -414;
        if (!used) return in.n >= HTTP_MAX_HEAD ? -431 : 0;
        at += used;
        if (n_lines && !line.n) break;
        if (n_lines > HTTP_MAX_HEADERS) return -431;
        code = n_lines ? http_parse_header(line, &r->headers[r->n_headers++]) : http_parse_request_line(line, r);
        if (code) return -code;
    }
    if ((code = http_check_host(r)) || (code = http_check_length(r)) || (code = http_check_coding(r)) ||
        (code = http_check_connection(r)) || (code = http_check_expect(r)))
        return -code;
    return at;
}

/* ---- The body of a request ---- */

enum http_body_state { HTTP_BODY_FIXED, HTTP_BODY_SIZE, HTTP_BODY_DATA, HTTP_BODY_DATA_END, HTTP_BODY_TRAILER, HTTP_BODY_DONE };

typedef struct http_body { /* a body as it arrives */
    enum http_body_state state;
    int64_t left;   /* bytes of the body or of this chunk still to come */
    int64_t total;  /* bytes of data so far */
    int64_t limit;  /* most bytes of data */
    size_t extra;   /* bytes of extensions and trailers so far */
    int n_trailers;
} http_body;

/* 0, or 413 if it is known to be too long. */
static int http_body_init(http_body *b, const http_request *r, int64_t limit) {
    *b = (http_body){.limit = limit, .left = r->chunked ? 0 : r->length};
    b->state = r->chunked ? HTTP_BODY_SIZE : r->length ? HTTP_BODY_FIXED : HTTP_BODY_DONE;
    return r->length > limit ? 413 : 0;
}

/* "1a;name=value": 0, or the status to answer. Digits only, at least one, no white space. */
static int http_chunk_size(http_body *b, str line) {
    size_t n = 0;
    int64_t size = 0;
    while (n < line.n && http_hex(line.p[n]) >= 0) {
        if (size > INT64_MAX >> 8) return 413;
        size = size << 4 | http_hex(line.p[n++]);
    }
    if (!n || (n < line.n && line.p[n] != ';')) return 400;
    for (size_t i = n; i < line.n; i++)
        if (((unsigned char)line.p[i] < ' ' && line.p[i] != '\t') || line.p[i] == 0x7F) return 400;
    if (size > b->limit - b->total) return 413;
    b->left = size;
    b->extra += line.n - n;
    b->state = size ? HTTP_BODY_DATA : HTTP_BODY_TRAILER;
    return b->extra > HTTP_MAX_CHUNK_EXTRA ? 400 : 0;
}

static int http_trailer(http_body *b, str line) {
    http_header unused;
    if (!line.n) return b->state = HTTP_BODY_DONE, 0;
    b->extra += line.n;
    if (++b->n_trailers > HTTP_MAX_HEADERS || b->extra > HTTP_MAX_CHUNK_EXTRA) return 431;
    return http_parse_header(line, &unused); /* read and left out: nothing here has a use for one */
}

/* A line of the framing around chunks. */
static ptrdiff_t http_body_line(http_body *b, str in) {
    bool trailer = b->state == HTTP_BODY_TRAILER;
    size_t most = trailer ? HTTP_MAX_CHUNK_EXTRA : HTTP_MAX_CHUNK_LINE;
    str line;
    ptrdiff_t used = http_line(in, &line);
    if (used < 0) return used;
    if (used > (ptrdiff_t)most || (!used && in.n > most)) return trailer ? -431 : -400;
    if (!used) return 0;
    int code = trailer ? http_trailer(b, line) : http_chunk_size(b, line);
    return code ? -code : used;
}

static ptrdiff_t http_body_data(http_body *b, str in, buf *out) {
    size_t n = (size_t)MIN((int64_t)in.n, b->left);
    buf_put(out, in.p, n);
    b->left -= (int64_t)n, b->total += (int64_t)n;
    if (!b->left) b->state = b->state == HTTP_BODY_FIXED ? HTTP_BODY_DONE : HTTP_BODY_DATA_END;
    return (ptrdiff_t)n;
}

/* Takes what it can from `in`, data appended to out. Bytes used (0: need more), or the negative of a status. The body is whole
 * when state is HTTP_BODY_DONE; what follows is the next request. */
static ptrdiff_t http_body_read(http_body *b, str in, buf *out) {
    size_t at = 0;
    while (b->state != HTTP_BODY_DONE && at < in.n) {
        str rest = str_sub(in, at, in.n);
        ptrdiff_t used;
        if (b->state == HTTP_BODY_FIXED || b->state == HTTP_BODY_DATA) {
            used = http_body_data(b, rest, out);
        } else if (b->state == HTTP_BODY_DATA_END) {
            if (rest.p[0] != '\r' || (rest.n > 1 && rest.p[1] != '\n')) return -400;
            used = rest.n > 1 ? 2 : 0;
            if (used) b->state = HTTP_BODY_SIZE;
        } else {
            used = http_body_line(b, rest);
        }
        if (used < 0) return used;
        if (!used) break;
        at += (size_t)used;
    }
    return (ptrdiff_t)at;
}

/* ---- Answers ---- */

static const char *http_reason(int status) {
    static const struct {
        int status;
        const char *reason;
    } all[] = {{100, "Continue"}, {200, "OK"}, {204, "No Content"}, {400, "Bad Request"}, {401, "Unauthorized"},
               {404, "Not Found"}, {405, "Method Not Allowed"}, {408, "Request Timeout"}, {409, "Conflict"},
               {413, "Content Too Large"}, {414, "URI Too Long"}, {415, "Unsupported Media Type"}, {417, "Expectation Failed"},
               {429, "Too Many Requests"}, {431, "Request Header Fields Too Large"}, {500, "Internal Server Error"},
               {501, "Not Implemented"}, {503, "Service Unavailable"}, {505, "HTTP Version Not Supported"},
               {507, "Insufficient Storage"}};
    for (int i = 0; i < COUNT(all); i++)
        if (all[i].status == status) return all[i].reason;
    return "Unknown";
}

/* "Sun, 06 Nov 1994 08:49:37 GMT"; unix: seconds since 1970. */
static void http_put_date(buf *b, int64_t unix_s) {
    static const char days[] = "ThuFriSatSunMonTueWed", months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
    int64_t day = unix_s / 86400, z = day + 719468; /* days since 0000-03-01, so that a leap day ends a year; eras of 400 years */
    int64_t era = z / 146097, doe = z - era * 146097, yoe = (doe - doe / 1460 + doe / 36524 - doe / 146096) / 365;
    int64_t doy = doe - (365 * yoe + yoe / 4 - yoe / 100), mp = (5 * doy + 2) / 153, month = mp < 10 ? mp + 2 : mp - 10;
    int s = (int)(unix_s % 86400), of_month = (int)(doy - (153 * mp + 2) / 5 + 1), year = (int)(yoe + era * 400 + (month < 2));
    buf_printf(b, "%.3s, %02d %.3s %04d %02d:%02d:%02d GMT", days + 3 * (day % 7), of_month, months + 3 * month, year, s / 3600,
               s / 60 % 60, s % 60);
}

enum { HTTP_CHUNKED = -1, HTTP_UNTIL_CLOSE = -2 }; /* lengths */

/* Status line and headers. length: bytes of the body, HTTP_CHUNKED or HTTP_UNTIL_CLOSE; type NULL: none. more: header lines. */
static void http_put_head(buf *b, int status, const char *type, int64_t length, bool keep_alive, int64_t unix_s, str more) {
    buf_printf(b, "HTTP/1.1 %d %s\r\nDate: ", status, http_reason(status));
    http_put_date(b, unix_s);
    buf_c(b, "\r\n");
    if (type) buf_printf(b, "Content-Type: %s\r\n", type);
    if (length >= 0 && status != 204) buf_printf(b, "Content-Length: %lld\r\n", (long long)length);
    if (length == HTTP_CHUNKED) buf_c(b, "Transfer-Encoding: chunked\r\n");
    buf_printf(b, "Connection: %s\r\n", keep_alive ? "keep-alive" : "close");
    buf_str(b, more);
    buf_c(b, "\r\n");
}

/* One chunk of a chunked answer; an empty one would end it, so it is left out. */
static void http_put_chunk(buf *b, str data) {
    if (!data.n) return;
    buf_printf(b, "%zx\r\n", data.n);
    buf_str(b, data);
    buf_c(b, "\r\n");
}
static void http_put_last_chunk(buf *b) { buf_c(b, "0\r\n\r\n"); }

/* ===========================================================================
 * MARK: 21. OpenAI API [pure]
 * Bodies of /v1/completions and /v1/chat/completions to requests of the engine, and the events of these to answers. The server
 * and the batch runner use the same functions, so a line of a file is answered as a body over HTTP is.
 *
 *     body --api_parse--> api_call: a part for each prompt, part.q ready for toka_submit              a worker's thread
 *     event --api_pack--> records: what the call needs of it, as bytes                                 the driving thread
 *     records --api_feed--> text; streaming: chunks of server-sent events; else collected             a worker's thread
 *     --api_finish--> the JSON answer; streaming: usage and [DONE]
 *
 * Choices are numbered prompt by prompt: choice i is sample i % n of part i / n. Text is made from ids by a detokenizer for each
 * choice in api_feed; where stop strings made the engine look at the text, the event's own text is taken.
 *
 * What always holds:
 *   - every field of a body is in api_fields: used, without effect here, or refused by name unless its value asks for nothing.
 *     One that is not there is reported or refused (api_model.strict);
 *   - what toka_submit would refuse for the request's own fault api_parse has refused; the message begins with the field's name;
 *   - the chunks of a stream, put together, are the answer without streaming; a chunk has whole characters only;
 *   - without api_model.live the answer's bytes depend on the body, the serial and the model alone: no clock, no cache.
 * A call is used by one thread at a time, except that api_pack only reads it.
 *
 * Two extensions: "return_packed": true gives ids and log-probabilities of a choice as base64 of little-endian arrays,
 *     "packed":{"n":N,"token_ids":int32[N],"logprobs":float32[N],"sampled_logprobs":float32[N],
 *               "top_n":k,"top_ids":int32[N][k] (-1: none),"top_logprobs":float32[N][k]}         the last two where k > 0
 * in place of "logprobs" and "token_ids" (and the same of the prompt as "prompt_packed", without "sampled_logprobs", where
 * return_token_ids or prompt_logprobs is asked for); and max_tokens may be 0 with echo or prompt_logprobs: then nothing is drawn.
 * =========================================================================== */
enum api_route { API_COMPLETIONS, API_CHAT, API_TOKENIZE, API_DETOKENIZE };

typedef struct api_model { /* what bodies are read against; read by any thread */
    const toka *t;            /* for its tokenizer, templates and shape; its engine is not touched here */
    const char *const *names; /* [n_names] served names, the first is the usual one. n_names 0: a body's model may be anything */
    int n_names;
    const char *name;         /* n_names 0: the model of an answer whose body names none */
    const char *fingerprint;  /* system_fingerprint of live answers */
    const char *const *beside; /* NULL-ended names of members that are the caller's, or NULL */
    toka_request base;        /* what a body gets that does not say otherwise */
    int completion_tokens;    /* max_tokens of a completion, where neither the body nor base has it; 0: as many as fit */
    int max_len;              /* tokens of a sequence */
    int max_choices;          /* of a call; 0: as many as the engine takes */
    const char *now;          /* the chat template's clock, NULL: local time */
    json_limits limits;       /* of a body */
    bool strict;              /* an unknown field is an error */
    bool live;                /* answers say what depends on the moment: cached_tokens, system_fingerprint; and stop_reason */
    void (*unknown)(void *user, str name); /* an unknown field is ignored; NULL: without a word */
    void *user;
} api_model;

typedef struct api_token { /* a token or one of its alternatives, id -1: there was none */
    int32_t id;
    float logprob, sampled;
} api_token;

typedef struct api_tokens { /* tokens with their alternatives, in a row */
    buf b;    /* api_token [n][1 + n_top] */
    int n_top;
} api_tokens;

typedef struct api_choice {
    tok_stream stream;
    buf text;          /* collected */
    api_tokens tokens; /* collected or, streaming, of the chunk being made; if the call wants any of it */
    int64_t n_tokens;
    int64_t offset;    /* streaming: characters sent in logprobs */
    toka_finish finish;
    int stop_id, stop_text;
    bool begun;        /* streaming: its first chunk is out */
} api_choice;

typedef struct api_part { /* one prompt: one request of the engine, `user` of its events */
    struct api_call *call;
    toka_request q;
    int64_t engine_id; /* the caller's, of toka_submit */
    int first;         /* its first choice */
    ids prompt;
    str text;          /* of the prompt, if the call echoes it */
    api_tokens scored; /* the prompt's tokens with log-probabilities, if wanted */
    int n_scored;
    buf waiting;       /* records of samples that came before the prompt's, which a stream sends first */
} api_part;

typedef struct api_call { /* caller's storage, zeroed, serial and created set; it stays where it is from api_parse to api_free */
    uint64_t serial[2]; /* unique: the answer's id, and the seed of a body without one */
    int64_t created;    /* seconds since 1970 */
    void *user;         /* the caller's */

    const api_model *m;
    arena a;            /* what parts point to */
    bool chat, stream;
    bool echo, want_ids, want_logprobs, want_prompt_logprobs, packed, names_are_ids, include_usage, usage_always;
    int n, n_top, n_prompt_top; /* samples of a prompt; alternatives of a token, of a prompt's token */
    str model;
    api_part *parts;    /* [n_parts] */
    int n_parts;
    api_choice *choices; /* [n_choices] */
    int n_choices, n_left; /* n_left: not ended */
    toka_finish broken; /* TOKA_FAILED or TOKA_CANCELLED once that ended a choice */
    int64_t n_prompt_tokens, n_output_tokens, n_cached_tokens;
    buf head;           /* streaming: the beginning of every chunk */
    buf text;           /* streaming: of one token */
    buf bytes, shown, names; /* of api_token_text, api_put_top */

    int status;         /* of api_parse that failed, for api_error: HTTP status, type and so on */
    const char *type, *param, *code;
    bool unsupported;   /* a field that is known and not done */
} api_call;

/* Errors of a body: the message begins with the field's name. */
#define API_BAD(...) fail(e, TOKA_E_USE, __VA_ARGS__)
#define API_UNSUPPORTED(c, ...) ((c)->unsupported = true, fail(e, TOKA_E_USE, __VA_ARGS__))

/* ---- The fields ---- */

enum api_use { API_USED, API_NO_EFFECT, API_REFUSED };
enum api_kind { API_ANY, API_NUMBER, API_WHOLE, API_BOOL, API_TEXT, API_LIST, API_OBJECT };
enum { API_C = 1 << API_COMPLETIONS, API_M = 1 << API_CHAT, API_T = 1 << API_TOKENIZE, API_D = 1 << API_DETOKENIZE,
       API_CM = API_C | API_M };

typedef struct api_body { /* a body's fields, at their defaults or as given */
    float temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    int64_t max_tokens, max_completion_tokens, min_tokens, top_k, n, best_of, seed, priority; /* -1: max_* not given */
    int64_t n_logprobs, top_logprobs, prompt_logprobs;                                        /* -1: not given */
    int chat_logprobs, echo, stream, ignore_eos, include_stop, special, skip_special, generate, return_token_ids, return_packed,
        names_are_ids, return_strs;
    str model;
    const json *prompt, *messages, *tools, *tool_choice, *documents, *kwargs, *stop, *stop_ids, *allowed, *bias, *bad_words,
        *stream_options, *tokens; /* NULL: not given */
    bool has_seed, has_max; /* max_tokens is the body's own word, no default */
} api_body;

typedef struct api_field {
    const char *name;
    int where;             /* API_C ..: bodies that have it */
    enum api_kind kind;
    enum api_use use;
    size_t at;             /* USED: in api_body, a float, int64_t, int, str or const json *, as kind says */
    int64_t low, high;     /* API_WHOLE */
    const char *harmless[2]; /* API_REFUSED: values, beside null, false, {} and [], that ask for nothing */
} api_field;

#define API_AT(member) offsetof(api_body, member)
#define API_NONE(name, where, kind) {name, where, kind, API_NO_EFFECT, 0, 0, 0, {0}}
#define API_NOT(name, where, ...) {name, where, API_ANY, API_REFUSED, 0, 0, 0, {__VA_ARGS__}}
#define API_F(name, where, kind, member) {name, where, kind, API_USED, API_AT(member), 0, 0, {0}}
#define API_I(name, where, member, low, high) {name, where, API_WHOLE, API_USED, API_AT(member), low, high, {0}}

static const api_field api_fields[] = {
    API_F("temperature", API_CM, API_NUMBER, temperature),
    API_F("model", API_CM | API_T | API_D, API_TEXT, model),
    API_F("prompt", API_C | API_T, API_ANY, prompt),
    API_F("messages", API_M | API_T, API_LIST, messages),
    API_F("tools", API_M | API_T, API_LIST, tools),
    API_F("tool_choice", API_M, API_ANY, tool_choice),
    API_F("documents", API_M, API_LIST, documents),
    API_F("chat_template_kwargs", API_M | API_T, API_OBJECT, kwargs),
    API_F("add_generation_prompt", API_M | API_T, API_BOOL, generate),
    API_F("add_special_tokens", API_CM | API_T, API_BOOL, special),
    API_F("top_p", API_CM, API_NUMBER, top_p),
    API_F("min_p", API_CM, API_NUMBER, min_p),
    API_F("repetition_penalty", API_CM, API_NUMBER, repetition_penalty),
    API_F("presence_penalty", API_CM, API_NUMBER, presence_penalty),
    API_F("frequency_penalty", API_CM, API_NUMBER, frequency_penalty),
    API_I("max_tokens", API_C, max_tokens, 0, INT_MAX),
    API_I("max_tokens", API_M, max_tokens, 1, INT_MAX),
    API_I("max_completion_tokens", API_CM, max_completion_tokens, 1, INT_MAX),
    API_I("min_tokens", API_CM, min_tokens, 0, INT_MAX),
    API_I("top_k", API_CM, top_k, -1, INT_MAX),
    API_I("n", API_CM, n, 1, ENG_MAX_N),
    API_I("best_of", API_C, best_of, 0, INT_MAX),
    API_I("seed", API_CM, seed, INT64_MIN, INT64_MAX),
    API_I("priority", API_CM, priority, -INT_MAX, INT_MAX),
    API_I("logprobs", API_C, n_logprobs, 0, TOKA_MAX_LOGPROBS),
    API_F("logprobs", API_M, API_BOOL, chat_logprobs),
    API_I("top_logprobs", API_M, top_logprobs, 0, TOKA_MAX_LOGPROBS),
    API_I("prompt_logprobs", API_CM, prompt_logprobs, 0, TOKA_MAX_LOGPROBS),
    API_F("echo", API_C, API_BOOL, echo),
    API_NOT("echo", API_M, 0),
    API_F("stream", API_CM, API_BOOL, stream),
    API_F("stream_options", API_CM, API_OBJECT, stream_options),
    API_F("skip_special_tokens", API_CM, API_BOOL, skip_special),
    API_F("ignore_eos", API_CM, API_BOOL, ignore_eos),
    API_F("include_stop_str_in_output", API_CM, API_BOOL, include_stop),
    API_F("return_token_ids", API_CM, API_BOOL, return_token_ids),
    API_F("return_tokens_as_token_ids", API_CM, API_BOOL, names_are_ids),
    API_F("return_packed", API_CM, API_BOOL, return_packed),
    API_F("return_token_strs", API_T, API_BOOL, return_strs),
    API_F("stop", API_CM, API_ANY, stop),
    API_F("stop_token_ids", API_CM, API_LIST, stop_ids),
    API_F("allowed_token_ids", API_CM, API_LIST, allowed),
    API_F("logit_bias", API_CM, API_OBJECT, bias),
    API_F("bad_words", API_CM, API_LIST, bad_words),
    API_F("tokens", API_D, API_LIST, tokens),
    API_NONE("user", API_CM, API_TEXT), API_NONE("metadata", API_CM, API_OBJECT), API_NONE("store", API_CM, API_BOOL),
    API_NONE("service_tier", API_CM, API_TEXT), API_NONE("safety_identifier", API_CM, API_TEXT),
    API_NONE("prompt_cache_key", API_CM, API_TEXT), API_NONE("request_id", API_CM, API_TEXT),
    API_NONE("parallel_tool_calls", API_M, API_BOOL),
    API_NOT("suffix", API_C, "\"\""),
    API_NOT("response_format", API_CM, "{\"type\":\"text\"}"),
    API_NOT("functions", API_M, 0),
    API_NOT("function_call", API_M, "\"none\"", "\"auto\""),
    API_NOT("modalities", API_M, "[\"text\"]"),
    API_NOT("audio", API_M, 0),
    API_NOT("prediction", API_M, 0),
    API_NOT("web_search_options", API_M, 0),
    API_NOT("reasoning_effort", API_M, 0),
    API_NOT("verbosity", API_M, "\"medium\""),
    API_NOT("chat_template", API_M | API_T, 0),
    API_NOT("continue_final_message", API_M | API_T, 0),
    API_NOT("use_beam_search", API_CM, 0),
    API_NOT("length_penalty", API_CM, "1", "1.0"),
    API_NOT("prompt_embeds", API_C, 0),
    API_NOT("truncate_prompt_tokens", API_CM, 0),
    API_NOT("spaces_between_special_tokens", API_CM, "true"),
    API_NOT("logits_processors", API_CM, 0),
    API_NOT("guided_json", API_CM, 0), API_NOT("guided_regex", API_CM, 0), API_NOT("guided_choice", API_CM, 0),
    API_NOT("guided_grammar", API_CM, 0), API_NOT("structured_outputs", API_CM, 0),
};

static const api_field *api_find_field(str name, int where) {
    for (int i = 0; i < COUNT(api_fields); i++)
        if (api_fields[i].where & where && str_is(name, api_fields[i].name)) return &api_fields[i];
    return NULL;
}

static bool api_is_harmless(const api_field *f, const json *v) {
    if (v->type == JSON_NULL || v->type == JSON_FALSE || (v->type >= JSON_ARRAY && !v->n)) return true;
    buf b = {0};
    bool same = false;
    json_put_value(&b, v);
    for (int i = 0; i < COUNT(f->harmless); i++) same |= f->harmless[i] && str_is(buf_view(&b), f->harmless[i]);
    buf_free(&b);
    return same;
}

/* A whole number may be written as 3.0. */
static int api_read_whole(const api_field *f, const json *v, int64_t *out, toka_err *e) {
    double d = json_num(v, NAN);
    bool whole = v->type == JSON_NUMBER && (v->exact || (d == floor(d) && fabs(d) < 0x1p53));
    if (!whole) return API_BAD("%s: expected a whole number", f->name);
    int64_t i = v->exact ? v->i : (int64_t)d;
    if (i < f->low || i > f->high)
        return API_BAD("%s: %lld, expected %lld to %lld", f->name, (long long)i, (long long)f->low, (long long)f->high);
    *out = i;
    return 0;
}

/* Checks a value's kind and puts it into its place. null is as good as absent. */
static int api_read_field(api_call *c, const api_field *f, const json *v, api_body *to, toka_err *e) {
    static const char *const expected[] = {"", "a number", "", "true or false", "a text", "a list", "an object"};
    static const int types[] = {-1, JSON_NUMBER, -1, -1, JSON_STRING, JSON_ARRAY, JSON_OBJECT};
    if (v->type == JSON_NULL) return 0;
    if (f->use == API_REFUSED && !api_is_harmless(f, v)) return API_UNSUPPORTED(c, "%s is not supported", f->name);
    bool right = types[f->kind] < 0 || types[f->kind] == v->type;
    if (f->kind == API_BOOL) right = v->type == JSON_TRUE || v->type == JSON_FALSE;
    if (f->kind == API_NUMBER) right = fabs(json_num(v, NAN)) <= FLT_MAX;
    if (!right) return API_BAD("%s: expected %s", f->name, expected[f->kind]);
    void *at = (char *)to + f->at;
    if (f->use != API_USED) return 0;
    switch (f->kind) {
    case API_NUMBER: *(float *)at = (float)json_num(v, 0); return 0;
    case API_WHOLE: return api_read_whole(f, v, at, e);
    case API_BOOL: *(int *)at = v->type == JSON_TRUE; return 0;
    case API_TEXT: *(str *)at = json_str(v); return 0;
    default: *(const json **)at = v; return 0;
    }
}

static int api_unknown(const api_model *m, str name, toka_err *e) {
    for (int i = 0; m->beside && m->beside[i]; i++)
        if (str_is(name, m->beside[i])) return 0;
    if (m->strict) return API_BAD("%.*s: a field of this name is not known", (int)MIN(name.n, (size_t)100), name.p);
    if (m->unknown) m->unknown(m->user, name);
    return 0;
}

static int api_read_body(api_call *c, enum api_route route, const json *body, api_body *b, toka_err *e) {
    const toka_sampling *s = &c->m->base.sampling;
    int completion = s->max_tokens || route == API_CHAT ? s->max_tokens : c->m->completion_tokens, code = 0;
    *b = (api_body){.temperature = s->temperature, .top_p = s->top_p, .min_p = s->min_p,
                    .repetition_penalty = s->repetition_penalty, .presence_penalty = s->presence_penalty,
                    .frequency_penalty = s->frequency_penalty, .max_tokens = -1, .max_completion_tokens = -1,
                    .min_tokens = s->min_tokens, .top_k = s->top_k, .n = c->m->base.n, .best_of = -1, .n_logprobs = -1,
                    .top_logprobs = -1, .prompt_logprobs = -1, .ignore_eos = s->ignore_eos, .include_stop = s->include_stop,
                    .special = -1, .skip_special = 1, .generate = 1, .model = STR("")};
    if (!json_is(body, JSON_OBJECT)) return API_BAD("body: expected a JSON object");
    JSON_MEMBERS(key, body) {
        const api_field *f = api_find_field((str){key->s, key->n}, 1 << route);
        code = f ? api_read_field(c, f, key + 1, b, e) : api_unknown(c->m, (str){key->s, key->n}, e);
        if (code) return code;
    }
    b->has_seed = json_is(json_get(body, "seed"), JSON_NUMBER);
    if (b->max_completion_tokens >= 0) b->max_tokens = b->max_completion_tokens;
    b->has_max = b->max_tokens >= 0;
    if (!b->has_max) b->max_tokens = completion ? completion : -1;
    return 0;
}

/* ---- Lists of ids, texts, biases ---- */

static int api_id_list(const json *v, const char *name, ids *out, toka_err *e) {
    if (!json_is(v, JSON_ARRAY)) return API_BAD("%s: expected a list of token ids", name);
    ids_reserve(out, v->n);
    JSON_EACH(it, v) {
        int64_t id = json_int(it, -1);
        if (id < 0 || id > INT32_MAX) return API_BAD("%s: element %zu is no token id", name, out->n);
        ids_push(out, (int32_t)id);
    }
    return 0;
}

/* The same into the call's arena; absent and [] give none. */
static int api_ids(api_call *c, const json *v, const char *name, const int32_t **out, int *n, toka_err *e) {
    ids list = {0};
    int code = v ? api_id_list(v, name, &list, e) : 0;
    if (!code && v) {
        int32_t *copy = arena_alloc(&c->a, list.n * sizeof *copy);
        if (list.n) memcpy(copy, list.p, list.n * sizeof *copy);
        *out = copy, *n = (int)list.n;
    }
    ids_free(&list);
    return code;
}

static int api_stops(api_call *c, const json *v, toka_sampling *s, toka_err *e) {
    if (!v) return 0;
    bool one = v->type == JSON_STRING;
    if (!one && v->type != JSON_ARRAY) return API_BAD("stop: expected a text or a list of texts");
    int n = 0;
    const char **stop = arena_alloc(&c->a, (one ? 1 : (size_t)v->n) * sizeof *stop);
    for (const json *it = one ? v : v + 1, *end = json_next(v); it < end; it = json_next(it)) {
        if (it->type != JSON_STRING || memchr(it->s, 0, it->n)) return API_BAD("stop: expected a text or a list of texts");
        stop[n++] = arena_cstr(&c->a, json_str(it));
    }
    s->stop = stop, s->n_stop = n;
    return 0;
}

static int api_bias(api_call *c, const json *v, toka_sampling *s, toka_err *e) { /* {"id": bias} */
    if (!v) return 0;
    int n = 0;
    int32_t *id = arena_alloc(&c->a, (size_t)v->n * sizeof *id);
    float *bias = arena_alloc(&c->a, (size_t)v->n * sizeof *bias);
    JSON_MEMBERS(key, v) {
        const char *digits = arena_cstr(&c->a, (str){key->s, key->n});
        char *end;
        long i = strtol(digits, &end, 10);
        double f = json_num(key + 1, NAN);
        if (!isdigit((unsigned char)*digits) || end != digits + key->n || i > INT32_MAX || !(fabs(f) <= FLT_MAX))
            return API_BAD("logit_bias: expected an object of token ids and numbers");
        id[n] = (int32_t)i, bias[n++] = (float)f;
    }
    s->bias_ids = id, s->bias_values = bias, s->n_bias = n;
    return 0;
}

/* A bad word is forbidden at the start of a text and, where that is other ids, behind a space: the second spelling counts if it
 * has as many ids and begins with another one (as vLLM has it). */
static int api_bad_word(const tok *t, str word, ids *out, int lengths[2], toka_err *e) {
    buf spaced = {0};
    size_t from = out->n, plain;
    while (word.n && word.p[0] == ' ') word = str_sub(word, 1, word.n);
    buf_char(&spaced, ' '), buf_str(&spaced, word);
    lengths[1] = 0;
    int code = tok_encode(t, word, 0, out, e);
    plain = out->n - from;
    if (!code) code = tok_encode(t, buf_view(&spaced), 0, out, e);
    buf_free(&spaced);
    if (code) return code;
    if (!plain) return API_BAD("bad_words: a word without tokens");
    lengths[0] = (int)plain;
    if (out->n - from - plain == plain && out->p[from] != out->p[from + plain]) lengths[1] = (int)plain;
    else out->n = from + plain;
    return 0;
}

static int api_bad_words(api_call *c, const json *v, toka_sampling *s, toka_err *e) {
    ids list = {0};
    int code = 0, n = 0;
    if (!v || !v->n) return 0;
    if (v->n > SAMP_MAX_BAD / 2) return API_BAD("bad_words: %u words, expected at most %d", v->n, SAMP_MAX_BAD / 2);
    if (pub_need_tokenizer(c->m->t, e)) return e->code;
    int *lengths = arena_alloc(&c->a, 2 * (size_t)v->n * sizeof *lengths);
    JSON_EACH(it, v) {
        if (it->type != JSON_STRING) code = API_BAD("bad_words: expected a list of texts");
        else code = api_bad_word(c->m->t->tok, json_str(it), &list, lengths + n, e);
        if (code) break;
        n += lengths[n + 1] ? 2 : 1;
    }
    if (!code) {
        int32_t *copy = arena_alloc(&c->a, list.n * sizeof *copy);
        s->bad_ids = memcpy(copy, list.p, list.n * sizeof *copy), s->bad_lengths = lengths, s->n_bad = n;
    }
    ids_free(&list);
    return code;
}

/* ---- What a body asks of the engine ---- */

/* Completions: a number of alternatives. Chats: true, with the number in top_logprobs. */
static int api_logprobs(api_call *c, const api_body *b, toka_request *q, toka_err *e) {
    int64_t k = c->chat ? b->top_logprobs : b->n_logprobs;
    if (c->chat && k > 0 && !b->chat_logprobs) return API_BAD("top_logprobs needs logprobs: true");
    c->want_logprobs = c->chat ? b->chat_logprobs != 0 : k >= 0;
    q->sampling.logprobs = c->n_top = c->want_logprobs ? (int)MAX(k, 0) : 0;
    c->want_prompt_logprobs = b->prompt_logprobs >= 0;
    c->n_prompt_top = (int)MAX(b->prompt_logprobs, 0);
    if (c->echo && c->want_logprobs) c->n_prompt_top = MAX(c->n_prompt_top, c->n_top);
    q->prompt_logprobs = c->want_prompt_logprobs || (c->echo && c->want_logprobs), q->prompt_top = c->n_prompt_top;
    if (c->stream && c->want_prompt_logprobs) return API_UNSUPPORTED(c, "prompt_logprobs with stream is not supported");
    return 0;
}

/* The seed of a body that has none: splitmix64's mixing of the seed of all and what is the call's own. */
static uint64_t api_seed(uint64_t seed, const uint64_t serial[2]) {
    uint64_t z = serial[1] ^ (serial[0] + 0x9E3779B97F4A7C15u * (seed + 1));
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static int api_sampling(api_call *c, const api_body *b, toka_request *q, toka_err *e) {
    toka_sampling *s = &q->sampling;
    s->temperature = b->temperature, s->top_p = b->top_p, s->min_p = b->min_p, s->top_k = (int)b->top_k;
    s->repetition_penalty = b->repetition_penalty, s->presence_penalty = b->presence_penalty;
    s->frequency_penalty = b->frequency_penalty, s->ignore_eos = b->ignore_eos, s->include_stop = b->include_stop;
    s->max_tokens = (int)MAX(b->max_tokens, 0), s->min_tokens = (int)b->min_tokens;
    s->seed = b->has_seed ? (uint64_t)b->seed : api_seed(s->seed, c->serial);
    q->priority -= (int)b->priority; /* in a body the lower is earlier, as in vLLM */
    c->n = q->n = (int)b->n;
    int code = api_logprobs(c, b, q, e);
    if (!code) code = api_ids(c, b->stop_ids, "stop_token_ids", &s->stop_ids, &s->n_stop_ids, e);
    if (!code) code = api_ids(c, b->allowed, "allowed_token_ids", &s->allowed_ids, &s->n_allowed, e);
    if (!code) code = api_stops(c, b->stop, s, e);
    if (!code) code = api_bias(c, b->bias, s, e);
    if (!code) code = api_bad_words(c, b->bad_words, s, e);
    if (code) return code;
    if (b->best_of >= 0 && b->best_of != b->n) return API_UNSUPPORTED(c, "best_of other than n is not supported");
    if (!b->max_tokens) { /* nothing is drawn; the prompt is looked at */
        if (!c->echo && !c->want_prompt_logprobs)
            return API_BAD("max_tokens: 0, expected 1 or more without echo or prompt_logprobs");
        q->n = 0, q->prompt_logprobs = 1, s->n_stop = 0, s->min_tokens = 0;
    }
    q->length_class = c->n < 16 ? 2 * (uint64_t)(uint32_t)s->max_tokens + c->chat + 1 : 0;
    q->ids_only = 1, q->keep_special = !b->skip_special;
    return 0;
}

static int api_stream_options(api_call *c, const api_body *b, toka_err *e) {
    static const char *const names[] = {"include_usage", "continuous_usage_stats"};
    bool *const to[] = {&c->include_usage, &c->usage_always};
    for (int i = 0; i < COUNT(names); i++) {
        const json *v = json_get(b->stream_options, names[i]);
        if (v && v->type != JSON_TRUE && v->type != JSON_FALSE && v->type != JSON_NULL)
            return API_BAD("stream_options: %s: expected true or false", names[i]);
        *to[i] = json_true(v);
    }
    c->include_usage |= c->usage_always;
    return 0;
}

static int api_check_model(api_call *c, str model, toka_err *e) {
    const api_model *m = c->m;
    c->model = arena_str(&c->a, model.n ? model : str_c(m->n_names ? m->names[0] : m->name));
    if (!model.n || !m->n_names) return 0;
    for (int i = 0; i < m->n_names; i++)
        if (str_is(model, m->names[i])) return 0;
    c->status = 404, c->type = "not_found_error", c->param = "model", c->code = "model_not_found";
    return fail(e, TOKA_E_USE, "model: '%.*s' is not served here, '%s' is", STRF(model), m->names[0]);
}

/* ---- Prompts ---- */

static bool api_is_text_part(const json *part) {
    return str_is(json_str(json_get(part, "type")), "text") && json_is(json_get(part, "text"), JSON_STRING);
}

/* A content of text parts as one text. */
static int api_put_parts(api_call *c, const json *parts, buf *b, toka_err *e) {
    buf text = {0};
    bool texts = true;
    JSON_EACH(part, parts) {
        texts &= api_is_text_part(part);
        if (text.n) buf_char(&text, '\n');
        buf_str(&text, json_str(json_get(part, "text")));
    }
    if (texts) json_put_str(b, buf_view(&text));
    buf_free(&text);
    return texts ? 0 : API_UNSUPPORTED(c, "messages: content other than text is not supported");
}

/* The calls that an assistant made, whose arguments came as JSON in a text: templates want the object. */
static void api_put_tool_call(api_call *c, const json *v, buf *b) {
    toka_err ignored;
    json_put_open(b, '{');
    JSON_MEMBERS(key, v) {
        json_put_str(b, json_str(key)), buf_char(b, ':');
        bool arguments = str_is(json_str(key), "arguments") && key[1].type == JSON_STRING;
        const json *parsed = arguments ? json_parse(&c->a, json_str(key + 1), c->m->limits, &ignored) : NULL;
        if (str_is(json_str(key), "function") && key[1].type == JSON_OBJECT) api_put_tool_call(c, key + 1, b);
        else json_put_value(b, json_is(parsed, JSON_OBJECT) ? parsed : key + 1);
    }
    json_put_close(b, '}');
}

static int api_put_message(api_call *c, const json *m, buf *b, toka_err *e) {
    int code = 0;
    if (m->type != JSON_OBJECT || !json_is(json_get(m, "role"), JSON_STRING))
        return API_BAD("messages: expected objects with a role and a content");
    json_put_open(b, '{');
    JSON_MEMBERS(key, m) {
        str name = json_str(key);
        json_put_str(b, name), buf_char(b, ':');
        bool content = str_is(name, "content");
        if (content && key[1].type != JSON_STRING && key[1].type != JSON_NULL && key[1].type != JSON_ARRAY)
            return API_BAD("messages: a content is a text or a list of parts");
        if (content && key[1].type == JSON_ARRAY) {
            if ((code = api_put_parts(c, key + 1, b, e))) return code;
        } else if (str_is(name, "tool_calls") && key[1].type == JSON_ARRAY) {
            json_put_open(b, '[');
            JSON_EACH(call, key + 1) call->type == JSON_OBJECT ? api_put_tool_call(c, call, b) : json_put_value(b, call);
            json_put_close(b, ']');
        } else {
            json_put_value(b, key + 1);
        }
    }
    json_put_close(b, '}');
    return 0;
}

/* What the chat template gets, as a JSON object. tool_choice "none": it sees no tools. */
static int api_context(api_call *c, const api_body *body, buf *b, toka_err *e) {
    int code = 0;
    bool none = str_is(json_str(body->tool_choice), "none"), automatic = str_is(json_str(body->tool_choice), "auto");
    const json *messages = body->messages, *tools = none ? NULL : body->tools;
    if (body->tool_choice && !none && !automatic)
        return API_UNSUPPORTED(c, "tool_choice is not supported, but for none and auto");
    if (!messages || !messages->n) return API_BAD("messages: expected a list of messages");
    json_put_open(b, '{');
    json_put_key(b, "messages"), json_put_open(b, '[');
    JSON_EACH(m, messages) if ((code = api_put_message(c, m, b, e))) return code;
    json_put_close(b, ']');
    json_put_key(b, "add_generation_prompt"), json_put_bool(b, body->generate);
    if (tools) json_put_key(b, "tools"), json_put_value(b, tools);
    if (body->documents) json_put_key(b, "documents"), json_put_value(b, body->documents);
    if (body->kwargs)
        JSON_MEMBERS(key, body->kwargs) json_put_str(b, json_str(key)), buf_char(b, ':'), json_put_value(b, key + 1);
    json_put_close(b, '}');
    return 0;
}

/* One prompt, or the chat, to ids; its text to *text, in the call's arena. */
static int api_encode(api_call *c, const api_body *b, const json *prompt, ids *out, str *text, toka_err *e) {
    buf context = {0}, rendered = {0};
    int code = 0, special = b->special >= 0 ? b->special : prompt != NULL;
    if (json_is(prompt, JSON_ARRAY)) return api_id_list(prompt, "prompt", out, e);
    if (pub_need_tokenizer(c->m->t, e)) return e->code;
    if (!prompt) {
        code = api_context(c, b, &context, e);
        if (!code) code = pub_need_template(c->m->t, e);
        if (!code) code = pub_render(c->m->t, c->m->t->chat, c->m->t->files, buf_view(&context), c->m->now, &rendered, e);
    } else if (prompt->type != JSON_STRING) {
        code = API_BAD("prompt: expected a text, token ids, or a list of either");
    }
    str s = prompt ? json_str(prompt) : buf_view(&rendered);
    if (!code) code = tok_encode(c->m->t->tok, s, TOKA_PARSE_SPECIAL | (special ? TOKA_ADD_SPECIAL : 0), out, e);
    if (!code && c->echo) *text = arena_str(&c->a, s);
    buf_free(&context), buf_free(&rendered);
    return code;
}

/* A default that is more than what the prompt leaves becomes that; what a body asks for is given or refused, as by OpenAI and vLLM. */
static int api_check_room(api_call *c, const api_body *b, size_t n_prompt, toka_err *e) {
    if (!b->has_max || n_prompt + (size_t)b->max_tokens <= (size_t)c->m->max_len) return 0;
    c->code = "context_length_exceeded";
    return API_BAD("%s: %lld behind a prompt of %zu tokens, expected at most %zu (max_model_len %d)",
                   b->max_completion_tokens >= 0 ? "max_completion_tokens" : "max_tokens", (long long)b->max_tokens, n_prompt,
                   (size_t)c->m->max_len - n_prompt, c->m->max_len);
}

static int api_part_init(api_call *c, const api_body *b, const toka_request *q, const json *prompt, toka_err *e) {
    int k = c->n_parts++;
    api_part *p = &c->parts[k];
    *p = (api_part){.call = c, .q = *q, .first = k * c->n, .text = STR("")};
    if (k && !b->has_seed) p->q.sampling.seed = api_seed(q->sampling.seed, (uint64_t[]){c->serial[0], (uint64_t)k});
    int code = api_encode(c, b, prompt, &p->prompt, &p->text, e);
    if (code) return code;
    ids_reserve(&p->prompt, 1); /* never NULL: NULL would mean the text */
    p->q.ids = p->prompt.p, p->q.n_ids = p->prompt.n, p->scored.n_top = c->n_prompt_top;
    c->n_prompt_tokens += (int64_t)p->prompt.n;
    if (p->prompt.n + (p->q.n != 0) > (size_t)c->m->max_len) c->code = "context_length_exceeded";
    code = eng_check(c->m->t->shape.V, c->m->max_len, c->m->t->tok != NULL, &p->q, p->prompt.p, p->prompt.n, e);
    if (!code) code = api_check_room(c, b, p->prompt.n, e);
    if (!code && c->echo && json_is(prompt, JSON_ARRAY) && c->m->t->tok) { /* given as ids: its text is what they say */
        buf_clear(&c->shown);
        code = tok_decode(c->m->t->tok, p->prompt.p, p->prompt.n, 0, &c->shown, e);
        p->text = arena_str(&c->a, buf_view(&c->shown));
    }
    return code;
}

/* A text, token ids, or a list of either. */
static int api_prompts(api_call *c, const api_body *b, const toka_request *q, toka_err *e) {
    const json *v = c->chat ? NULL : b->prompt, *first = json_at(v, 0);
    bool many = first && first->type != JSON_NUMBER;
    size_t n = many ? v->n : 1, most = (size_t)(c->m->max_choices ? c->m->max_choices : ENG_MAX_N);
    if (!c->chat && !v) return API_BAD("prompt: missing");
    if (n > most / (size_t)c->n)
        return API_BAD("n: %d for each of %zu prompts, expected at most %zu in all", c->n, n, most);
    c->parts = mem_zalloc(n * sizeof *c->parts);
    if (!many) return api_part_init(c, b, q, v, e);
    JSON_EACH(it, v) if (api_part_init(c, b, q, it, e)) return e->code;
    return 0;
}

/* ---- Calls ---- */

static void api_choices_init(api_call *c) {
    c->n_choices = c->n_left = c->n_parts * c->n;
    c->choices = mem_zalloc((size_t)c->n_choices * sizeof *c->choices);
    for (int i = 0; i < c->n_choices; i++) {
        api_choice *x = &c->choices[i];
        const api_part *p = &c->parts[i / c->n];
        x->tokens.n_top = c->n_top, x->stop_id = x->stop_text = -1;
        if (!c->m->t->tok) continue;
        tok_stream_init(&x->stream, c->m->t->tok, p->q.keep_special ? 0 : TOKA_SKIP_SPECIAL);
        tok_stream_follow(&x->stream, p->prompt.p[p->prompt.n - 1]);
    }
}

static int api_parse_fields(api_call *c, enum api_route route, const json *body, toka_err *e) {
    api_body b;
    toka_request q = c->m->base;
    c->chat = route == API_CHAT;
    int code = api_read_body(c, route, body, &b, e);
    if (code) return code;
    c->stream = b.stream, c->echo = b.echo, c->want_ids = b.return_token_ids, c->packed = b.return_packed;
    c->names_are_ids = b.names_are_ids;
    if ((code = api_check_model(c, b.model, e)) || (code = api_stream_options(c, &b, e))) return code;
    if (!(code = api_sampling(c, &b, &q, e))) code = api_prompts(c, &b, &q, e);
    return code;
}

/* What is said about a failed parse beside the message: whose name does that begin with? */
static void api_blame(api_call *c, enum api_route route, const toka_err *e) {
    size_t n = 0;
    while (isalnum((unsigned char)e->msg[n]) || e->msg[n] == '_') n++;
    const api_field *f = api_find_field((str){e->msg, n}, 1 << route);
    if (!c->status) c->status = e->code == TOKA_E_DEVICE || e->code == TOKA_E_IO || e->code == TOKA_E_MEMORY ? 500 : 400;
    if (!c->code && c->unsupported) c->code = "unsupported_parameter";
    if (c->param) return;
    c->param = f ? f->name : NULL;
    if (!f && (c->code || c->n_parts) && c->status == 400) c->param = c->chat ? "messages" : "prompt";
}

/* Reads a body, already JSON, into a call; nothing of it is needed after. 0, or a negative code with c->status, type, param,
 * code and unsupported set; in both cases api_free takes the call apart. Encodes text: not for the driving thread. */
static int api_parse_json(const api_model *m, enum api_route route, const json *body, api_call *c, toka_err *e) {
    c->m = m;
    int code = api_parse_fields(c, route, body, e);
    if (code) api_blame(c, route, e);
    else api_choices_init(c);
    return code;
}

static int api_parse(const api_model *m, enum api_route route, str body, api_call *c, toka_err *e) {
    arena a = {0};
    const json *root = json_parse(&a, body, m->limits, e);
    int code = root ? api_parse_json(m, route, root, c, e) : e->code;
    if (!root) c->status = 400, c->m = m;
    arena_free(&a);
    return code;
}

static void api_free(api_call *c) {
    for (int i = 0; i < c->n_choices; i++) {
        tok_stream_free(&c->choices[i].stream);
        buf_free(&c->choices[i].text), buf_free(&c->choices[i].tokens.b);
    }
    for (int i = 0; i < c->n_parts; i++)
        ids_free(&c->parts[i].prompt), buf_free(&c->parts[i].scored.b), buf_free(&c->parts[i].waiting);
    free(c->choices), free(c->parts);
    buf_free(&c->head), buf_free(&c->text), buf_free(&c->bytes), buf_free(&c->shown), buf_free(&c->names);
    arena_free(&c->a);
    c->choices = NULL, c->parts = NULL, c->n_choices = c->n_parts = 0;
}

/* ---- Records: events as bytes ---- */

typedef struct api_record { /* followed by its alternatives (id, logprob) and its text */
    int32_t part, sample, id, stop_id, stop_text, n_cached;
    float logprob, sampled;
    uint32_t n_text;
    uint16_t n_top;
    uint8_t finish, has_text;
} api_record;

/* Appends one event of a part. For the driving thread: no text is made, nothing is locked. */
static void api_pack(const api_part *p, const toka_event *ev, buf *records) {
    api_record r = {.part = (int32_t)(p - p->call->parts), .sample = ev->sample, .id = ev->id, .stop_id = ev->stop_id,
                    .stop_text = ev->stop_text, .n_cached = ev->n_cached, .logprob = ev->logprob, .sampled = ev->sampled_logprob,
                    .n_text = ev->text ? (uint32_t)ev->text_bytes : 0, .n_top = (uint16_t)ev->n_top,
                    .finish = (uint8_t)ev->finish, .has_text = ev->text != NULL};
    size_t n = (size_t)ev->n_top;
    buf_put(records, &r, sizeof r);
    if (n) buf_put(records, ev->top_ids, n * sizeof *ev->top_ids);
    if (n) buf_put(records, ev->top_logprobs, n * sizeof *ev->top_logprobs);
    if (r.n_text) buf_put(records, ev->text, ev->text_bytes);
}

/* What would come of a part that the engine did not take. */
static void api_pack_end(const api_part *p, toka_finish how, buf *records) {
    toka_event ev = {.id = -1, .finish = how, .stop_id = -1, .stop_text = -1};
    for (int i = 0; i < MAX(p->q.n, 1); i++) ev.sample = p->q.n ? i : TOKA_PROMPT, api_pack(p, &ev, records);
}

/* The first record of s; `rest` is what stands behind its head, and *n the bytes of all. */
static api_record api_unpack(str s, str *rest, size_t *n) {
    api_record r;
    assert(s.n >= sizeof r);
    memcpy(&r, s.p, sizeof r);
    *n = sizeof r + (size_t)r.n_top * (sizeof(int32_t) + sizeof(float)) + r.n_text;
    assert(s.n >= *n);
    *rest = str_sub(s, sizeof r, *n);
    return r;
}

static void api_tokens_put(api_tokens *t, const api_record *r, str rest) {
    const size_t n = (size_t)r->n_top;
    buf_put(&t->b, &(api_token){r->id, r->logprob, r->sampled}, sizeof(api_token));
    for (size_t i = 0; i < (size_t)t->n_top; i++) {
        api_token top = {.id = -1};
        if (i < n) memcpy(&top.id, rest.p + i * sizeof top.id, sizeof top.id);
        if (i < n) memcpy(&top.logprob, rest.p + n * sizeof top.id + i * sizeof top.logprob, sizeof top.logprob);
        buf_put(&t->b, &top, sizeof top);
    }
}

static size_t api_tokens_n(const api_tokens *t) { return t->b.n / sizeof(api_token) / (1 + (size_t)t->n_top); }

/* Token i, or (k > 0) its k-th alternative. */
static const api_token *api_token_at(const api_tokens *t, size_t i, size_t k) {
    return (const api_token *)(const void *)t->b.p + i * (1 + (size_t)t->n_top) + k;
}

/* ---- Tokens as JSON ---- */

/* The text of a token for a reader, in c->shown until the next call, and its bytes, which may be part of a character. */
static str api_token_text(api_call *c, int32_t id, str *bytes) {
    buf *raw = &c->bytes;
    buf_clear(raw), buf_clear(&c->shown);
    if (c->m->t->tok) tok_bytes(c->m->t->tok, id, raw);
    *bytes = buf_view(raw);
    if (!c->names_are_ids) return uni_repair(*bytes, &c->shown);
    buf_printf(&c->shown, "token_id:%d", (int)id);
    return buf_view(&c->shown);
}

static int64_t api_characters(str bytes) { /* that begin in it */
    int64_t n = 0;
    for (size_t i = 0; i < bytes.n; i++) n += ((unsigned char)bytes.p[i] & 0xC0) != 0x80;
    return n;
}

static void api_put_logprob(buf *b, float logprob) { /* OpenAI's way to say: impossible */
    json_put_num(b, logprob == -INFINITY ? -9999 : logprob, true);
}

static void api_put_ids(buf *b, const char *name, const int32_t *id, size_t n) {
    json_put_key(b, name), json_put_open(b, '[');
    for (size_t i = 0; i < n; i++) json_put_int(b, id[i]);
    json_put_close(b, ']');
}

/* {token: logprob ..}: the n_top alternatives and the token itself. Of equal texts the first, likelier one counts. */
static void api_put_top(api_call *c, const api_tokens *t, size_t i, int n_top, buf *b) {
    buf *seen = &c->names;
    str bytes;
    buf_clear(seen), buf_char(seen, '\n'); /* each name stands between line feeds, which JSON texts do not have */
    json_put_open(b, '{');
    for (int k = 1; k <= n_top + 1; k++) {
        const api_token *v = api_token_at(t, i, k > n_top ? 0 : (size_t)k);
        if (v->id < 0) continue;
        size_t from = seen->n;
        json_put_str(seen, api_token_text(c, v->id, &bytes)), buf_char(seen, '\n');
        str name = str_sub(buf_view(seen), from, seen->n);
        if (str_find((str){seen->p, from}, (str){name.p - 1, name.n + 1}, 0) >= 0) {
            seen->n = from;
            continue;
        }
        json_comma(b), buf_put(b, name.p, name.n - 1), buf_char(b, ':');
        api_put_logprob(b, v->logprob);
    }
    json_put_close(b, '}');
}

/* {"tokens":[..],"token_logprobs":[..],"top_logprobs":[..],"text_offset":[..]} of the tokens of two lists, one behind the other
 * (the first may be NULL: nothing is echoed). The first token of a prompt has null. Offsets count the text's characters. */
static void api_put_text_logprobs(api_call *c, const api_tokens *echo, const api_tokens *t, int64_t *offset, buf *b) {
    const api_tokens *const lists[] = {echo, t};
    buf offsets = {0};
    str bytes;
    json_put_open(b, '{');
    json_put_key(b, "tokens"), json_put_open(b, '[');
    for (int l = 0; l < 2; l++)
        for (size_t i = 0; lists[l] && i < api_tokens_n(lists[l]); i++) {
            json_put_str(b, api_token_text(c, api_token_at(lists[l], i, 0)->id, &bytes));
            json_put_int(&offsets, *offset);
            *offset += api_characters(bytes);
        }
    json_put_close(b, ']');
    json_put_key(b, "token_logprobs"), json_put_open(b, '[');
    for (int l = 0; l < 2; l++)
        for (size_t i = 0; lists[l] && i < api_tokens_n(lists[l]); i++) {
            if (!l && !i) json_put_null(b);
            else api_put_logprob(b, api_token_at(lists[l], i, 0)->logprob);
        }
    json_put_close(b, ']');
    json_put_key(b, "top_logprobs"), json_put_open(b, '[');
    for (int l = 0; l < 2; l++)
        for (size_t i = 0; lists[l] && i < api_tokens_n(lists[l]); i++) {
            if (!l && !i) json_put_null(b);
            else api_put_top(c, lists[l], i, c->n_top, b);
        }
    json_put_close(b, ']');
    json_put_key(b, "text_offset");
    buf_printf(b, "[%s]}", offsets.n ? offsets.p : "");
    buf_free(&offsets);
}

/* "token":"..","logprob":..,"bytes":[..] */
static void api_put_chat_token(api_call *c, const api_token *t, buf *b) {
    str bytes;
    json_put_key(b, "token"), json_put_str(b, api_token_text(c, t->id, &bytes));
    json_put_key(b, "logprob"), api_put_logprob(b, t->logprob);
    json_put_key(b, "bytes"), json_put_open(b, '[');
    for (size_t i = 0; i < bytes.n; i++) json_put_int(b, (unsigned char)bytes.p[i]);
    json_put_close(b, ']');
}

static void api_put_chat_logprobs(api_call *c, const api_tokens *t, buf *b) {
    json_put_open(b, '{');
    json_put_key(b, "content"), json_put_open(b, '[');
    for (size_t i = 0; i < api_tokens_n(t); i++) {
        json_put_open(b, '{');
        api_put_chat_token(c, api_token_at(t, i, 0), b);
        json_put_key(b, "top_logprobs"), json_put_open(b, '[');
        for (int k = 1; k <= t->n_top; k++) {
            const api_token *v = api_token_at(t, i, (size_t)k);
            if (v->id < 0) continue;
            json_put_open(b, '{');
            api_put_chat_token(c, v, b);
            json_put_close(b, '}');
        }
        json_put_close(b, ']'), json_put_close(b, '}');
    }
    json_put_close(b, ']');
    json_put_key(b, "refusal"), json_put_null(b);
    json_put_close(b, '}');
}

/* vLLM's form: [null, {"ID":{"logprob":..,"rank":..,"decoded_token":".."} ..} ..], the token itself first. rank: 1 is the most
 * likely; null where it is behind the alternatives. */
static void api_put_prompt_logprobs(api_call *c, const api_tokens *t, int n_top, buf *b) {
    json_put_key(b, "prompt_logprobs"), json_put_open(b, '[');
    for (size_t i = 0; i < api_tokens_n(t); i++) {
        const api_token *self = api_token_at(t, i, 0);
        int rank = 0;
        str bytes;
        if (!i) json_put_null(b);
        else json_put_open(b, '{');
        for (int k = 1; k <= t->n_top && !rank; k++)
            if (api_token_at(t, i, (size_t)k)->id == self->id) rank = k;
        for (int k = 0; i && k <= n_top; k++) {
            const api_token *v = api_token_at(t, i, (size_t)k);
            if (v->id < 0 || (k && k == rank)) continue;
            json_comma(b), buf_printf(b, "\"%d\":{", (int)v->id);
            json_put_key(b, "logprob"), api_put_logprob(b, v->logprob);
            json_put_key(b, "rank");
            if (k || rank) json_put_int(b, k ? k : rank);
            else json_put_null(b);
            json_put_key(b, "decoded_token"), json_put_str(b, api_token_text(c, v->id, &bytes));
            json_put_close(b, '}');
        }
        if (i) json_put_close(b, '}');
    }
    json_put_close(b, ']');
}

/* ---- Packed arrays ---- */

static void api_put_base64(buf *b, const char *name, const buf *bytes) { /* RFC 4648, with padding */
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    json_put_key(b, name), buf_char(b, '"');
    buf_reserve(b, bytes->n / 3 * 4 + 8);
    for (size_t i = 0; i < bytes->n; i += 3) {
        size_t n = MIN(bytes->n - i, (size_t)3);
        uint32_t w = 0;
        for (size_t k = 0; k < 3; k++) w = w << 8 | (k < n ? (unsigned char)bytes->p[i + k] : 0u);
        char four[4] = {digit[w >> 18], digit[w >> 12 & 63], n > 1 ? digit[w >> 6 & 63] : '=', n > 2 ? digit[w & 63] : '='};
        buf_put(b, four, 4);
    }
    buf_char(b, '"');
}

static void api_put_le32(buf *b, const void *value) { /* four bytes, the lowest first */
    uint32_t u;
    memcpy(&u, value, 4);
    buf_put(b, (char[]){(char)u, (char)(u >> 8), (char)(u >> 16), (char)(u >> 24)}, 4);
}

/* One array of all tokens: `member` is its place in api_token; alternatives k0 .. k1 of each. */
static void api_put_array(api_call *c, buf *b, const char *name, const api_tokens *t, size_t member, int k0, int k1) {
    buf *raw = &c->shown;
    buf_clear(raw);
    for (size_t i = 0; i < api_tokens_n(t); i++)
        for (int k = k0; k <= k1; k++) api_put_le32(raw, (const char *)api_token_at(t, i, (size_t)k) + member);
    api_put_base64(b, name, raw);
}

static void api_put_packed(api_call *c, const char *name, const api_tokens *t, bool sampled, buf *b) {
    json_put_key(b, name), json_put_open(b, '{');
    json_put_key(b, "n"), json_put_int(b, (int64_t)api_tokens_n(t));
    api_put_array(c, b, "token_ids", t, offsetof(api_token, id), 0, 0);
    api_put_array(c, b, "logprobs", t, offsetof(api_token, logprob), 0, 0);
    if (sampled) api_put_array(c, b, "sampled_logprobs", t, offsetof(api_token, sampled), 0, 0);
    json_put_key(b, "top_n"), json_put_int(b, t->n_top);
    if (t->n_top) api_put_array(c, b, "top_ids", t, offsetof(api_token, id), 1, t->n_top);
    if (t->n_top) api_put_array(c, b, "top_logprobs", t, offsetof(api_token, logprob), 1, t->n_top);
    json_put_close(b, '}');
}

/* ---- Choices ---- */

static bool api_wants_tokens(const api_call *c) { return c->want_ids || c->want_logprobs || c->packed; }

static void api_put_logprobs(api_call *c, const api_tokens *echo, api_choice *x, buf *b) {
    json_put_key(b, "logprobs");
    if (!c->want_logprobs || c->packed) json_put_null(b);
    else if (c->chat) api_put_chat_logprobs(c, &x->tokens, b);
    else api_put_text_logprobs(c, echo, &x->tokens, &x->offset, b);
}

/* stop_reason: what of stop or stop_token_ids it was; null: the model's own end. */
static void api_put_finish(const api_call *c, const api_choice *x, const api_part *p, bool ended, buf *b) {
    json_put_key(b, "finish_reason");
    if (!ended) json_put_null(b);
    else json_put_str(b, x->finish == TOKA_STOP ? STR("stop") : STR("length"));
    if (!c->m->live) return;
    json_put_key(b, "stop_reason");
    bool asked = ended && x->stop_id >= 0 && samp_listed(p->q.sampling.stop_ids, p->q.sampling.n_stop_ids, x->stop_id);
    if (ended && x->stop_text >= 0) json_put_str(b, str_c(p->q.sampling.stop[x->stop_text]));
    else if (asked) json_put_int(b, x->stop_id);
    else json_put_null(b);
}

/* Ids and packed arrays of the tokens that x holds. */
static void api_put_choice_ids(api_call *c, api_choice *x, buf *b) {
    if (c->packed) api_put_packed(c, "packed", &x->tokens, true, b);
    if (!c->want_ids || c->packed) return;
    json_put_key(b, "token_ids"), json_put_open(b, '[');
    for (size_t i = 0; i < api_tokens_n(&x->tokens); i++) json_put_int(b, api_token_at(&x->tokens, i, 0)->id);
    json_put_close(b, ']');
}

/* What is said about a prompt: in each choice of a completion, beside the choices of a chat. */
static void api_put_prompt(api_call *c, api_part *p, buf *b) {
    if (c->packed && (c->want_ids || c->want_prompt_logprobs)) {
        if (!p->scored.b.n) { /* ids alone: as tokens without log-probabilities */
            p->scored.n_top = 0;
            for (size_t i = 0; i < p->prompt.n; i++) buf_put(&p->scored.b, &(api_token){p->prompt.p[i], 0, 0}, sizeof(api_token));
        }
        api_put_packed(c, "prompt_packed", &p->scored, false, b);
        return;
    }
    if (c->want_ids) api_put_ids(b, "prompt_token_ids", p->prompt.p, p->prompt.n);
    if (c->want_prompt_logprobs) api_put_prompt_logprobs(c, &p->scored, MIN(c->n_prompt_top, p->scored.n_top), b);
}

static void api_put_choice(api_call *c, int index, buf *b) {
    api_choice *x = &c->choices[index];
    api_part *p = &c->parts[index / c->n];
    json_put_open(b, '{');
    json_put_key(b, "index"), json_put_int(b, index);
    if (c->chat) {
        json_put_key(b, "message"), json_put_open(b, '{');
        json_put_key(b, "role"), json_put_str(b, STR("assistant"));
        json_put_key(b, "content"), json_put_str(b, buf_view(&x->text));
        json_put_key(b, "refusal"), json_put_null(b);
        json_put_close(b, '}');
    } else {
        buf_clear(&c->shown);
        if (c->echo) buf_str(&c->shown, p->text), buf_str(&c->shown, buf_view(&x->text));
        json_put_key(b, "text"), json_put_str(b, buf_view(c->echo ? &c->shown : &x->text));
    }
    api_put_logprobs(c, c->echo ? &p->scored : NULL, x, b);
    api_put_finish(c, x, p, true, b);
    api_put_choice_ids(c, x, b);
    if (!c->chat) api_put_prompt(c, p, b);
    json_put_close(b, '}');
}

static void api_put_usage(const api_call *c, buf *b) {
    json_put_key(b, "usage"), json_put_open(b, '{');
    json_put_key(b, "prompt_tokens"), json_put_int(b, c->n_prompt_tokens);
    json_put_key(b, "completion_tokens"), json_put_int(b, c->n_output_tokens);
    json_put_key(b, "total_tokens"), json_put_int(b, c->n_prompt_tokens + c->n_output_tokens);
    if (c->m->live) {
        json_put_key(b, "prompt_tokens_details"), json_put_open(b, '{');
        json_put_key(b, "cached_tokens"), json_put_int(b, c->n_cached_tokens), json_put_close(b, '}');
    }
    json_put_close(b, '}');
}

/* What every answer and every chunk begins with, up to its choices. */
static void api_put_head(const api_call *c, buf *b) {
    json_put_open(b, '{');
    json_put_key(b, "id");
    buf_printf(b, "\"%s%016llx%016llx\"", c->chat ? "chatcmpl-" : "cmpl-", (unsigned long long)c->serial[0],
               (unsigned long long)c->serial[1]);
    json_put_key(b, "object");
    json_put_str(b, !c->chat ? STR("text_completion") : c->stream ? STR("chat.completion.chunk") : STR("chat.completion"));
    json_put_key(b, "created"), json_put_int(b, c->created);
    json_put_key(b, "model"), json_put_str(b, c->model);
    if (c->m->live && c->m->fingerprint) json_put_key(b, "system_fingerprint"), json_put_str(b, str_c(c->m->fingerprint));
    json_put_key(b, "choices"), json_put_open(b, '[');
}

/* ---- Streaming ---- */

static void api_chunk_open(api_call *c, buf *out) {
    if (!c->head.n) buf_c(&c->head, "data: "), api_put_head(c, &c->head);
    buf_str(out, buf_view(&c->head));
}
static void api_chunk_close(api_call *c, api_part *prompt, bool usage, buf *out) { /* prompt: what is asked of it, or NULL */
    json_put_close(out, ']');
    if (prompt) api_put_prompt(c, prompt, out);
    if (usage) api_put_usage(c, out);
    else if (c->include_usage) json_put_key(out, "usage"), json_put_null(out);
    buf_c(out, "}\n\n");
}

/* The chunk that comes before the first token of a choice: a chat's role, the prompt of a completion if it is asked for. */
static void api_put_first_chunk(api_call *c, int index, buf *out) {
    api_choice *x = &c->choices[index];
    api_part *p = &c->parts[index / c->n];
    api_tokens none = {.n_top = c->n_top};
    api_chunk_open(c, out);
    json_put_open(out, '{');
    json_put_key(out, "index"), json_put_int(out, index);
    if (c->chat) buf_c(out, ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"}");
    else json_put_key(out, "text"), json_put_str(out, p->text);
    json_put_key(out, "logprobs");
    if (c->echo && c->want_logprobs && !c->packed) api_put_text_logprobs(c, &p->scored, &none, &x->offset, out);
    else json_put_null(out);
    api_put_finish(c, x, p, false, out);
    if (!c->chat) api_put_prompt(c, p, out);
    json_put_close(out, '}');
    api_chunk_close(c, c->chat ? p : NULL, c->usage_always, out);
}

/* A chunk with this text and the tokens that the choice holds. */
static void api_put_chunk(api_call *c, int index, str text, buf *out) {
    api_choice *x = &c->choices[index];
    bool ended = x->finish != TOKA_RUNNING;
    api_chunk_open(c, out);
    json_put_open(out, '{');
    json_put_key(out, "index"), json_put_int(out, index);
    if (c->chat) {
        json_put_key(out, "delta"), json_put_open(out, '{');
        if (text.n || !ended) json_put_key(out, "content"), json_put_str(out, text);
        json_put_close(out, '}');
    } else {
        json_put_key(out, "text"), json_put_str(out, text);
    }
    if (x->tokens.b.n) api_put_logprobs(c, NULL, x, out);
    else json_put_key(out, "logprobs"), json_put_null(out);
    api_put_finish(c, x, &c->parts[index / c->n], ended, out);
    api_put_choice_ids(c, x, out);
    json_put_close(out, '}');
    api_chunk_close(c, NULL, c->usage_always, out);
}

/* The chunks for one token's text; none if there is nothing to say. */
static void api_stream(api_call *c, int index, str text, buf *out) {
    api_choice *x = &c->choices[index];
    if (!x->begun && (c->chat || c->echo || c->want_ids)) api_put_first_chunk(c, index, out);
    x->begun = true;
    if (text.n || x->tokens.b.n || x->finish != TOKA_RUNNING) api_put_chunk(c, index, text, out);
    buf_clear(&x->tokens.b);
}

/* ---- Feeding ---- */

static void api_end_choice(api_call *c, api_choice *x, const api_record *r) {
    x->finish = r->finish, x->stop_id = r->stop_id, x->stop_text = r->stop_text;
    c->n_left--;
    if (x->finish == TOKA_CANCELLED || x->finish == TOKA_FAILED) c->broken = MAX(c->broken, x->finish);
}

/* A token of a choice, or its end without one. */
static void api_feed_sample(api_call *c, api_part *p, const api_record *r, str rest, buf *out) {
    int index = p->first + r->sample;
    api_choice *x = &c->choices[index];
    buf *to = c->stream ? &c->text : &x->text;
    buf_clear(&c->text);
    if (r->id >= 0) {
        c->n_cached_tokens += !x->n_tokens && !r->sample ? r->n_cached : 0;
        x->n_tokens++, c->n_output_tokens++;
        if (api_wants_tokens(c)) api_tokens_put(&x->tokens, r, rest);
    }
    if (r->has_text) buf_put(to, rest.p + rest.n - r->n_text, r->n_text);
    else if (c->m->t->tok && r->id >= 0) {
        if (r->stop_id < 0) tok_stream_put(&x->stream, r->id, to);
        if (r->finish != TOKA_RUNNING) tok_stream_end(&x->stream, to);
    }
    if (r->finish != TOKA_RUNNING) api_end_choice(c, x, r);
    if (c->stream && !c->broken) api_stream(c, index, buf_view(&c->text), out);
}

/* A token of a prompt. The last one of a call that draws nothing ends its choices. */
static void api_feed_prompt(api_call *c, api_part *p, const api_record *r, str rest, buf *out) {
    if (r->id >= 0) api_tokens_put(&p->scored, r, rest), p->n_scored++;
    for (int i = 0; i < c->n && r->finish != TOKA_RUNNING; i++) {
        api_end_choice(c, &c->choices[p->first + i], r);
        if (c->stream && !c->broken) api_stream(c, p->first + i, STR(""), out);
    }
}

/* The records that waited for a part's prompt. */
static void api_release(api_call *c, api_part *p, buf *out) {
    size_t n;
    for (str s = buf_view(&p->waiting), rest; s.n; s = str_sub(s, n, s.n)) {
        api_record r = api_unpack(s, &rest, &n);
        api_feed_sample(c, p, &r, rest, out);
    }
    buf_clear(&p->waiting);
}

/* Whole records, in their order, to text; c->n_left is 0 when all is said. Streaming: chunks are appended to out, maybe none.
 * Tokens of a sample wait for those of the prompt, which stand before them in the stream; not if the call is broken. */
static void api_feed(api_call *c, str records, buf *out) {
    size_t n;
    for (str rest; records.n; records = str_sub(records, n, records.n)) {
        api_record r = api_unpack(records, &rest, &n);
        api_part *p = &c->parts[r.part];
        bool wait = c->stream && p->q.prompt_logprobs && p->n_scored < (int)p->prompt.n;
        if (r.sample == TOKA_PROMPT) api_feed_prompt(c, p, &r, rest, out);
        else if (wait && !c->broken && r.finish < TOKA_CANCELLED) buf_put(&p->waiting, records.p, n);
        else api_feed_sample(c, p, &r, rest, out);
        if (wait && p->n_scored == (int)p->prompt.n) api_release(c, p, out);
    }
    for (int i = 0; i < c->n_parts && c->stream && c->broken; i++) api_release(c, &c->parts[i], out);
}

/* ---- Ends ---- */

static const char *api_error_type(int status) {
    switch (status) {
    case 401: case 403: return "authentication_error";
    case 404: return "not_found_error";
    case 429: return "rate_limit_error";
    case 503: return "unavailable_error";
    default: return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

static void api_put_text_or_null(buf *b, const char *name, const char *value) {
    json_put_key(b, name);
    if (value) json_put_str(b, str_c(value));
    else json_put_null(b);
}

/* {"error":{"message","type","param","code"}}. type NULL: by status; param and code may be NULL. */
static void api_error(buf *out, int status, const char *message, const char *type, const char *param, const char *code) {
    json_put_open(out, '{');
    json_put_key(out, "error"), json_put_open(out, '{');
    api_put_text_or_null(out, "message", message);
    api_put_text_or_null(out, "type", type ? type : api_error_type(status));
    api_put_text_or_null(out, "param", param), api_put_text_or_null(out, "code", code);
    buf_c(out, "}}");
}

static int api_put_broken(const api_call *c, buf *out) {
    bool failed = c->broken == TOKA_FAILED;
    int status = failed ? 500 : 503;
    const char *message = failed ? "the device failed, nothing more can be computed" : "the request was cancelled";
    api_error(out, status, message, NULL, NULL, NULL);
    return status;
}

/* When n_left is 0: the answer, or the end of the stream. Returns the HTTP status of an answer that is not streamed: 200, or 500
 * if the device failed, 503 if the call was cancelled; out has the error then. */
static int api_finish(api_call *c, buf *out) {
    assert(!c->n_left);
    int status = 200;
    if (!c->stream) {
        if (c->broken) return api_put_broken(c, out);
        api_put_head(c, out);
        for (int i = 0; i < c->n_choices; i++) api_put_choice(c, i, out);
        json_put_close(out, ']');
        if (c->chat) api_put_prompt(c, &c->parts[0], out);
        api_put_usage(c, out);
        json_put_close(out, '}');
        return status;
    }
    if (c->broken) buf_c(out, "data: "), status = api_put_broken(c, out), buf_c(out, "\n\n");
    else if (c->include_usage) api_chunk_open(c, out), api_chunk_close(c, NULL, true, out);
    buf_c(out, "data: [DONE]\n\n");
    return status;
}

/* ---- Models, tokenize, detokenize ---- */

static void api_put_model(const api_model *m, const char *name, int64_t created, buf *b) {
    json_put_open(b, '{');
    json_put_key(b, "id"), json_put_str(b, str_c(name));
    json_put_key(b, "object"), json_put_str(b, STR("model"));
    json_put_key(b, "created"), json_put_int(b, created);
    json_put_key(b, "owned_by"), json_put_str(b, STR("toka"));
    json_put_key(b, "root"), json_put_str(b, str_c(m->t->files->name));
    json_put_key(b, "parent"), json_put_null(b);
    json_put_key(b, "max_model_len"), json_put_int(b, m->max_len);
    json_put_close(b, '}');
}

/* /v1/models, or /v1/models/ID if id is not empty. False: there is no such model. */
static bool api_models(const api_model *m, str id, int64_t created, buf *out) {
    for (int i = 0; i < m->n_names && id.n; i++)
        if (str_is(id, m->names[i])) return api_put_model(m, m->names[i], created, out), true;
    if (id.n) return false;
    json_put_open(out, '{');
    json_put_key(out, "object"), json_put_str(out, STR("list"));
    json_put_key(out, "data"), json_put_open(out, '[');
    for (int i = 0; i < m->n_names; i++) api_put_model(m, m->names[i], created, out);
    buf_c(out, "]}");
    return true;
}

/* {"count","max_model_len","tokens","token_strs"} of a prompt or of messages. */
static int api_tokenize(api_call *c, const api_body *b, buf *out, toka_err *e) {
    ids v = {0};
    str text, bytes;
    int code = b->prompt && b->prompt->type != JSON_STRING ? API_BAD("prompt: expected a text") : 0;
    if (!code && !b->prompt && !b->messages) code = API_BAD("prompt: missing");
    if (!code) code = api_encode(c, b, b->prompt, &v, &text, e);
    if (!code) {
        json_put_open(out, '{');
        json_put_key(out, "count"), json_put_int(out, (int64_t)v.n);
        json_put_key(out, "max_model_len"), json_put_int(out, c->m->max_len);
        api_put_ids(out, "tokens", v.p, v.n);
        json_put_key(out, "token_strs"), b->return_strs ? json_put_open(out, '[') : json_put_null(out);
        for (size_t i = 0; i < v.n && b->return_strs; i++) json_put_str(out, api_token_text(c, v.p[i], &bytes));
        if (b->return_strs) json_put_close(out, ']');
        json_put_close(out, '}');
    }
    ids_free(&v);
    return code;
}

static int api_detokenize(api_call *c, const api_body *b, buf *out, toka_err *e) {
    ids v = {0};
    int code = b->tokens ? api_id_list(b->tokens, "tokens", &v, e) : API_BAD("tokens: missing");
    if (!code) code = pub_need_tokenizer(c->m->t, e);
    toka_err why;
    if (!code && tok_decode(c->m->t->tok, v.p, v.n, 0, &c->shown, &why)) code = API_BAD("tokens: %.400s", why.msg);
    if (!code) {
        json_put_open(out, '{');
        json_put_key(out, "prompt"), json_put_str(out, buf_view(&c->shown));
        json_put_close(out, '}');
    }
    ids_free(&v);
    return code;
}

/* A body of /tokenize or /detokenize answered at once. Fails as api_parse does. */
static int api_simple(const api_model *m, enum api_route route, str body, buf *out, toka_err *e, int *status,
                      const char **param) {
    api_call c = {.m = m};
    api_body b;
    const json *root = json_parse(&c.a, body, m->limits, e);
    int code = root ? api_read_body(&c, route, root, &b, e) : e->code;
    if (!code) code = api_check_model(&c, b.model, e);
    if (!code) code = route == API_TOKENIZE ? api_tokenize(&c, &b, out, e) : api_detokenize(&c, &b, out, e);
    if (code) api_blame(&c, route, e);
    *status = c.status, *param = c.param;
    api_free(&c);
    return code;
}

/* ===========================================================================
 * MARK: 22. Batch runner [os]
 * A file of requests in, a file of results out, however long both are. Three threads, each with one job:
 *
 *     reader   run_read:  a line --run_identify, run_parse--> toka_submit       waits while the window is full
 *     driver   toka_run, whose events run_on_event packs into the line          (the thread that called run_batch)
 *     writer   run_write: records to text; a line whose last sample ended --run_put_result--> one write()    progress, Ctrl-C
 *
 * Input lines are OpenAI's batch lines {"custom_id","method","url","body"} or short ones: the body itself, with "custom_id"
 * or "id" beside its fields. A line without either is called "line-N", N its number in the file. Every line gets one output
 * line: a result, or an error record {"custom_id","response":null,"error":{"code","message"}}.
 *
 * What always holds:
 *   - what is written is a function of the input line, the flags and the model: no clock ("created" is 0), no random ids
 *     (they are the hash of the custom_id), and a line without a seed gets api_seed(--seed, custom_id), so that no two
 *     lines share random numbers. Only the order of lines differs from run to run. (A chat template that prints the date
 *     asks the clock after all; --now sets it);
 *   - an output line is written whole or is the last one of the file and torn. The next run cuts that, skips every
 *     custom_id that is there, error records too, and appends the rest: nothing lost, nothing twice. The file is locked;
 *   - custom_ids are unique: the input is read once before anything runs, and a second one is refused with both line
 *     numbers (from standard input, which cannot be read twice: when it comes);
 *   - memory: the window of lines under way, and 24 bytes for each custom_id in a table at most 3/4 full, which knows ids
 *     by a hash of 128 bits. A line that was cancelled or that the device failed is not written: the next run does it.
 * run.lock guards the window, the writer's queue, the records that lines have for it, and run.e. A line's call is read by the
 * driver and belongs to the writer once the engine has it. Order of locks: run.lock before the engine's. Bodies and answers:
 * chapter 21.
 * =========================================================================== */

enum { RUN_LINE_BYTES = 64 << 20, RUN_CHUNK_BYTES = 1 << 18, RUN_FLIGHT_BYTES = 256 << 20, RUN_RECORD_BYTES = 1 << 12 };
enum { RUN_FEW_LINES = 4 };
static const json_limits run_limits = {128, RUN_LINE_BYTES};

typedef struct run_options { /* what toka batch was asked to do */
    const char *in, *out; /* paths; "-": standard input, standard output */
    const char *errors;   /* a file for error records, NULL: they go to out */
    const char *report;   /* a file for the closing report as JSON, or NULL */
    const char *now;      /* the chat template's clock, NULL: local time */
    toka_request base;    /* what a line that does not say otherwise gets */
    const api_model *model; /* NULL; or what OpenAI's batch lines are read against instead */
    bool quiet;           /* no progress, no report */
    atomic_int *interrupted;
    int64_t until;        /* stop when this time has come, seconds since 1970; 0: no limit */
    bool expired;         /* it has come: every line that is left becomes an error record */
    atomic_llong *completed, *failed; /* lines written so far, results and errors, by earlier runs too; may be NULL */
} run_options;

typedef struct run_key { /* FNV-1a of 128 bits, the same on every machine */
    uint64_t hi, lo;
} run_key;

typedef struct run_seen { /* a custom_id; state 0: an empty place */
    run_key key;
    uint64_t state; /* number of its input line * 2, + 1 if its result is written */
} run_seen;

typedef struct run_table { /* open addressing, cap a power of two */
    run_seen *at;
    size_t n, cap;
} run_table;

typedef struct run_input { /* lines of a file */
    int fd;
    const char *name;
    atomic_int *interrupted;
    char *chunk; /* [RUN_CHUNK_BYTES] */
    size_t at, n;
    int64_t number; /* of the line last read, from 1 */
    buf text;
    bool too_long; /* the line is cut at RUN_LINE_BYTES */
} run_input;

typedef struct run_line { /* from its reading to its writing */
    struct run_state *run;
    char *custom_id;
    run_key key;
    api_call call;
    size_t bytes;       /* of the input line */
    buf fresh;          /* records of events, the driver's until they go to */
    buf ready;          /* those for the writer; guarded by run.lock, as is what follows */
    bool in_flight, queued;
    const char *error;  /* code of an error record; NULL: a result */
    char *message;
    struct run_line *next, *before, *after; /* in the writer's queue; in the list of those under way */
} run_line;

typedef struct run_sink { /* an output */
    const char *path;
    int fd;        /* -1: not open */
    bool is_file;
    int64_t bytes; /* whole lines in the file */
} run_sink;

typedef struct run_state { /* a batch under way */
    const run_options *o;
    toka *t;
    run_input in;
    run_table seen;
    run_sink results, errors; /* errors.fd -1: error records go to results */
    int64_t n_lines, n_before; /* lines of the input, -1: not known; of these, done by earlier runs */
    api_model models[2]; /* what bodies are read against: [1] those that stand in OpenAI's batch lines */
    buf warned;        /* names of unknown fields that were reported, each with a line feed behind it */
    double t0, t_shown;
    int64_t n_written, n_errors;

    pthread_mutex_t lock;
    pthread_cond_t wake;
    run_line *queue, **queue_end; /* lines with records for the writer, or ended without any */
    run_line *flight; /* lines the engine has */
    int64_t n_flight_lines, n_flight_samples, n_flight_bytes; /* read and not yet written */
    bool read_all, stopped; /* stopped: Ctrl-C or an error, nothing more is started */
    toka_err e;       /* why, code 0: Ctrl-C */
} run_state;

/* ---- Ids ---- */

static run_key run_hash(str s) {
    unsigned __int128 h = (unsigned __int128)0x6C62272E07BB0142u << 64 | 0x62B821756295C58Du;
    const unsigned __int128 prime = (unsigned __int128)1 << 88 | 0x13B;
    for (size_t i = 0; i < s.n; i++) h = (h ^ (unsigned char)s.p[i]) * prime;
    return (run_key){(uint64_t)(h >> 64), (uint64_t)h};
}

/* The place of a key, made if it is new (state 0 then; the caller sets it). Valid until the next call. */
static run_seen *run_table_at(run_table *t, run_key key) {
    if (t->n + 1 > t->cap / 4 * 3) {
        run_table old = *t;
        t->cap = MAX((size_t)1024, 2 * old.cap), t->n = 0;
        t->at = mem_zalloc(t->cap * sizeof *t->at);
        for (size_t i = 0; i < old.cap; i++)
            if (old.at[i].state) *run_table_at(t, old.at[i].key) = old.at[i], t->n++;
        free(old.at);
    }
    size_t i = (size_t)(key.lo ^ key.hi >> 7) & (t->cap - 1);
    while (t->at[i].state && (t->at[i].key.hi != key.hi || t->at[i].key.lo != key.lo)) i = (i + 1) & (t->cap - 1);
    t->at[i].key = key;
    return &t->at[i];
}
static void run_table_set(run_table *t, run_seen *s, uint64_t state) { t->n += !s->state, s->state = state; }

/* ---- Lines of a file ---- */

static void run_input_init(run_input *r, int fd, const char *name, atomic_int *interrupted) {
    *r = (run_input){.fd = fd, .name = name, .interrupted = interrupted, .chunk = mem_alloc(RUN_CHUNK_BYTES)};
}
static void run_input_free(run_input *r) { free(r->chunk), buf_free(&r->text); }

/* More bytes into the chunk; 1, 0 at the end, or an error. A pipe is polled, so that Ctrl-C gets through. */
static int run_fill(run_input *r, toka_err *e) {
    for (;;) {
        struct pollfd p = {.fd = r->fd, .events = POLLIN};
        int ready = poll(&p, 1, 200);
        if (*r->interrupted) return 0;
        if (ready == 0 || (ready < 0 && errno == EINTR)) continue;
        ssize_t n = read(r->fd, r->chunk, RUN_CHUNK_BYTES);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n < 0) return fail(e, TOKA_E_IO, "%s: %s", r->name, strerror(errno));
        r->at = 0, r->n = (size_t)n;
        return n > 0;
    }
}

/* The next line without its line feed, empty ones too; valid until the next call. 1, 0 at the end, or an error.
 * whole, if not NULL: whether a line feed ended it. */
static int run_next_line(run_input *r, str *line, bool *whole, toka_err *e) {
    bool any = false, found = false;
    buf_clear(&r->text);
    r->too_long = false;
    while (!found) {
        int code = r->at < r->n ? 1 : run_fill(r, e);
        if (code < 0) return code;
        if (!code) break;
        const char *p = r->chunk + r->at, *feed = memchr(p, '\n', r->n - r->at);
        size_t n = feed ? (size_t)(feed - p) : r->n - r->at, room = RUN_LINE_BYTES - r->text.n;
        r->too_long |= n > room;
        buf_put(&r->text, p, MIN(n, room));
        r->at += n + (feed != NULL);
        any = true, found = feed != NULL;
    }
    r->number += any;
    if (whole) *whole = found;
    *line = buf_view(&r->text);
    if (r->number == 1 && str_starts(*line, STR("\xEF\xBB\xBF"))) *line = str_sub(*line, 3, line->n);
    return any;
}

static bool run_is_blank(str line) {
    for (size_t i = 0; i < line.n; i++)
        if (!strchr(" \t\r", line.p[i]) || !line.p[i]) return false;
    return true;
}

/* ---- What a line says ---- */

static bool run_is_long(const json *root) { return json_get(root, "body") || json_get(root, "url"); }

/* The custom_id of a line, root NULL if it is not JSON. */
static void run_identify(const json *root, int64_t number, buf *id) {
    const json *v = json_get(root, "custom_id");
    if (!v && !run_is_long(root)) v = json_get(root, "id");
    buf_clear(id);
    if (json_is(v, JSON_STRING)) buf_str(id, json_str(v));
    else if (json_is(v, JSON_NUMBER) && v->exact) buf_printf(id, "%lld", (long long)v->i);
    else buf_printf(id, "line-%lld", (long long)number);
}

/* Once for each name, as long as 4 KB hold them. */
static void run_warn(void *user, str name) {
    enum { MOST_BYTES = 4096 };
    run_state *r = user;
    buf entry = {0};
    buf_printf(&entry, "\n%.*s\n", STRF(name));
    if (!r->warned.n) buf_char(&r->warned, '\n');
    if (str_find(buf_view(&r->warned), buf_view(&entry), 0) < 0 && r->warned.n < MOST_BYTES) {
        buf_put(&r->warned, entry.p + 1, entry.n - 1);
        buf_clear(&entry);
        json_put_str(&entry, str_sub(name, 0, MIN(name.n, (size_t)100)));
        fprintf(stderr, "toka batch: line %lld: unknown field %s is ignored, on all other lines too\n",
                (long long)r->in.number, entry.p);
    }
    buf_free(&entry);
}

/* Fails the line with one of the codes of an error record. */
#define RUN_FAIL(line, name, ...) ((line)->error = (name), fail(e, TOKA_E_USE, __VA_ARGS__))
#define RUN_BAD(line, ...) RUN_FAIL(line, "invalid_request", __VA_ARGS__)

/* Which of the two forms, whose body, and what it is for. */
static int run_form(run_line *line, const json *root, const json **body, enum api_route *route, toka_err *e) {
    const json *id = json_get(root, "custom_id"), *method = json_get(root, "method"), *url = json_get(root, "url");
    if (root->type != JSON_OBJECT) return RUN_BAD(line, "expected a JSON object");
    if (id && id->type != JSON_STRING) return RUN_BAD(line, "custom_id: expected a text");
    *body = root;
    *route = json_get(root, "messages") ? API_CHAT : API_COMPLETIONS;
    if (!run_is_long(root)) return 0;
    *body = json_get(root, "body");
    *route = str_is(json_str(url), "/v1/chat/completions") ? API_CHAT : API_COMPLETIONS;
    if (method && !str_is(json_str(method), "POST")) return RUN_BAD(line, "method: expected POST");
    if (*route == API_COMPLETIONS && !str_is(json_str(url), "/v1/completions"))
        return RUN_FAIL(line, "unsupported", "url: '%.*s', expected /v1/completions or /v1/chat/completions",
                        STRF(json_str(url)));
    if (!json_is(*body, JSON_OBJECT)) return RUN_BAD(line, "body: expected a JSON object");
    JSON_MEMBERS(key, root) {
        str name = {key->s, key->n};
        bool known = str_is(name, "custom_id") || str_is(name, "method") || str_is(name, "url") || str_is(name, "body");
        if (!known) run_warn(line->run, name);
    }
    return 0;
}

/* Reads one line into a call. Fails with line->error set. root NULL: it was no JSON, *e says why. */
static int run_parse(run_line *line, const json *root, toka_err *e) {
    const json *body = root;
    enum api_route route = API_COMPLETIONS;
    if (!root) {
        line->error = "invalid_json";
        return e->code;
    }
    int code = run_form(line, root, &body, &route, e);
    if (code) return code;
    line->call.serial[0] = line->key.hi, line->call.serial[1] = line->key.lo;
    code = api_parse_json(&line->run->models[run_is_long(root)], route, body, &line->call, e);
    if (code) line->error = line->call.unsupported ? "unsupported" : "invalid_request";
    else if (line->call.stream) code = RUN_FAIL(line, "unsupported", "stream is not supported in a batch");
    return code;
}

static void run_models(run_state *r) {
    static const char *const beside[] = {"custom_id", "id", NULL};
    r->models[0] = (api_model){.t = r->t, .name = r->t->files->name, .beside = beside, .base = r->o->base,
                               .max_len = r->t->shape.max_len, .now = r->o->now, .limits = run_limits, .unknown = run_warn,
                               .user = r};
    r->models[1] = r->o->model ? *r->o->model : r->models[0];
    r->models[1].completion_tokens = 16; /* as the API says */
    r->models[1].live = false, r->models[1].base = r->o->base; /* what is written depends on the line alone */
    r->models[1].beside = beside, r->models[1].limits = run_limits, r->models[1].unknown = run_warn, r->models[1].user = r;
}

/* ---- Reader ---- */

static run_line *run_line_new(run_state *r, str id, run_key key, size_t bytes) {
    run_line *line = mem_zalloc(sizeof *line);
    line->run = r, line->key = key, line->bytes = bytes;
    line->custom_id = mem_check(strndup(id.p, id.n));
    return line;
}

static void run_line_free(run_line *line) {
    api_free(&line->call);
    buf_free(&line->fresh), buf_free(&line->ready);
    free(line->custom_id), free(line->message);
    free(line);
}

/* To the writer, if it is not there. With run.lock held. */
static void run_queue(run_state *r, run_line *line) {
    if (line->queued) return;
    line->queued = true, line->next = NULL;
    *r->queue_end = line, r->queue_end = &line->next;
    pthread_cond_broadcast(&r->wake);
}

/* The driver's: one token of one sample. Records go to the writer when a sample ended, or when they are many. */
static int run_on_event(void *user, const toka_event *ev) {
    const api_part *part = user;
    run_line *line = part->call->user;
    api_pack(part, ev, &line->fresh);
    if ((ev->finish == TOKA_RUNNING || ev->more) && line->fresh.n < RUN_RECORD_BYTES) return 0;
    pthread_mutex_lock(&line->run->lock);
    if (!line->ready.n) {
        buf empty = line->ready;
        line->ready = line->fresh, line->fresh = empty;
    } else {
        buf_str(&line->ready, buf_view(&line->fresh));
    }
    buf_clear(&line->fresh);
    run_queue(line->run, line);
    pthread_mutex_unlock(&line->run->lock);
    return 0;
}

static void run_cancel(run_state *r, const run_line *line) {
    for (int i = 0; i < line->call.n_parts; i++) toka_cancel(r->t, line->call.parts[i].engine_id);
}

static void run_stop(run_state *r, const toka_err *e) { /* with run.lock held; e NULL: Ctrl-C */
    if (r->stopped) return;
    r->stopped = true;
    if (e) r->e = *e;
    for (run_line *line = r->flight; line; line = line->after) run_cancel(r, line);
    pthread_cond_broadcast(&r->wake);
}

/* Why the device failed. False: it works. */
static bool run_device_failed(run_state *r, toka_err *e) {
    eng *g = r->t->engine;
    pthread_mutex_lock(&g->lock);
    *e = g->broken;
    pthread_mutex_unlock(&g->lock);
    return e->code != 0;
}

/* Waits for room in the window: a few times the samples that run at once, and a few lines if each has many. False: stop. */
static bool run_wait_for_room(run_state *r) {
    int64_t most = 4 * (int64_t)r->t->engine->max_seqs;
    pthread_mutex_lock(&r->lock);
    while (!r->stopped && ((r->n_flight_samples >= most && r->n_flight_lines >= RUN_FEW_LINES) ||
                           (r->n_flight_bytes > RUN_FLIGHT_BYTES && r->n_flight_lines)))
        pthread_cond_wait(&r->wake, &r->lock);
    bool go_on = !r->stopped;
    pthread_mutex_unlock(&r->lock);
    return go_on;
}

/* All parts of a line to the engine. With run.lock held, so that the writer does not see the line before it is whole. */
static int run_submit(run_state *r, run_line *line, toka_err *e) {
    api_call *c = &line->call;
    int code = 0;
    c->user = line;
    line->in_flight = true;
    line->after = r->flight;
    if (r->flight) r->flight->before = line;
    r->flight = line;
    for (int i = 0; i < c->n_parts; i++) {
        if (!code) code = toka_submit(r->t, &c->parts[i].q, run_on_event, &c->parts[i], &c->parts[i].engine_id, e);
        if (code) api_pack_end(&c->parts[i], TOKA_CANCELLED, &line->ready);
    }
    if (!code) return 0;
    run_cancel(r, line);
    run_queue(r, line);
    return code;
}

/* A parsed line to the engine, or as an error record to the writer. Takes the line. */
static int run_start(run_state *r, run_line *line, int code, toka_err *e) {
    if (code) line->message = mem_check(strdup(e->msg));
    pthread_mutex_lock(&r->lock);
    r->n_flight_lines++, r->n_flight_samples += MAX(line->call.n_choices, 1), r->n_flight_bytes += (int64_t)line->bytes;
    int broken = 0;
    if (code || r->stopped) run_queue(r, line);
    else if ((broken = run_submit(r, line, e)) && broken != TOKA_E_DEVICE) {
        line->error = "invalid_request", line->message = mem_check(strdup(e->msg));
        broken = 0;
    }
    pthread_mutex_unlock(&r->lock);
    return broken;
}

static int run_twice(const run_state *r, int64_t number, const run_seen *s, str id, toka_err *e) {
    return fail(e, TOKA_E_USE, "%s: lines %lld and %lld have the same custom_id '%.*s'", r->in.name,
                (long long)(s->state >> 1), (long long)number, STRF(id));
}

/* One line of the input: known ids are skipped, the rest goes on its way. */
static int run_take_line(run_state *r, str text, toka_err *e) {
    arena a = {0};
    buf id = {0};
    toka_err why = {0};
    const json *root = NULL;
    if (r->in.too_long) fail(&why, TOKA_E_INPUT, "longer than %d bytes", RUN_LINE_BYTES);
    else root = json_parse(&a, text, run_limits, &why);
    run_identify(root, r->in.number, &id);
    run_key key = run_hash(buf_view(&id));
    run_seen *s = run_table_at(&r->seen, key);
    int code = 0;
    bool done = s->state & 1;
    if (r->n_lines < 0 && s->state >> 1) code = run_twice(r, r->in.number, s, buf_view(&id), e), done = true;
    else if (r->n_lines < 0) run_table_set(&r->seen, s, (uint64_t)r->in.number << 1 | done), r->n_before += done;
    if (!done) {
        run_line *line = run_line_new(r, buf_view(&id), key, text.n);
        int bad = r->o->expired ? fail(&why, TOKA_E_USE, "the completion window closed before this request was done")
                                : run_parse(line, root, &why);
        if (r->o->expired) line->error = "batch_expired";
        code = run_start(r, line, bad, &why);
        if (code) *e = why;
    }
    arena_free(&a), buf_free(&id);
    return code;
}

/* The reader's thread. */
static void *run_read(void *user) {
    run_state *r = user;
    toka_err e;
    str line;
    int code = 0;
    while (run_wait_for_room(r) && (code = run_next_line(&r->in, &line, NULL, &e)) > 0) {
        if (!run_is_blank(line) && (code = run_take_line(r, line, &e))) break;
    }
    pthread_mutex_lock(&r->lock);
    if (code == TOKA_E_USE && !r->e.code) r->e = e; /* a second custom_id in standard input: what runs may end */
    else if (code < 0) run_stop(r, &e);
    r->read_all = true;
    pthread_cond_broadcast(&r->wake);
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

/* ---- Results as JSON ---- */

static void run_put_key_id(buf *b, const char *name, const char *head, run_key key) {
    json_put_key(b, name);
    json_comma(b);
    buf_printf(b, "\"%s%016llx%016llx\"", head, (unsigned long long)key.hi, (unsigned long long)key.lo);
}

/* The line of the output file, with its line feed. */
static void run_put_result(run_line *line, buf *b) {
    json_put_open(b, '{');
    run_put_key_id(b, "id", "batch_req_", line->key);
    json_put_key(b, "custom_id"), json_put_str(b, str_c(line->custom_id));
    json_put_key(b, "response");
    bool refused = line->run->errors.fd >= 0 && line->call.status; /* as OpenAI writes what a server refused */
    if (line->error && !refused) {
        json_put_null(b);
    } else {
        const api_call *c = &line->call;
        json_put_open(b, '{');
        json_put_key(b, "status_code"), json_put_int(b, line->error ? c->status : 200);
        run_put_key_id(b, "request_id", "req_", line->key);
        json_put_key(b, "body");
        if (line->error) api_error(b, c->status, line->message, c->type, c->param, c->code);
        else api_finish(&line->call, b);
        json_put_close(b, '}');
    }
    json_put_key(b, "error");
    if (line->error) {
        json_put_open(b, '{');
        json_put_key(b, "code"), json_put_str(b, str_c(line->error));
        json_put_key(b, "message"), json_put_str(b, str_c(line->message));
        json_put_close(b, '}');
    } else {
        json_put_null(b);
    }
    buf_c(b, "}\n");
}

/* ---- Progress ---- */

static void run_progress(run_state *r, bool terminal) {
    double now = os_now(), spent = now - r->t0;
    if (r->o->quiet || now - r->t_shown < (terminal ? 0.25 : 10)) return;
    r->t_shown = now;
    toka_stats s = toka_get_stats(r->t);
    char total[32] = "?", eta[32] = "?";
    int64_t done = r->n_before + r->n_written;
    if (r->n_lines >= 0) snprintf(total, sizeof total, "%lld", (long long)r->n_lines);
    if (r->n_lines >= 0 && r->n_written) {
        int64_t left = (int64_t)((double)(r->n_lines - done) * spent / (double)r->n_written);
        snprintf(eta, sizeof eta, "%lld:%02d:%02d", (long long)(left / 3600), (int)(left / 60 % 60), (int)(left % 60));
    }
    char bar[31];
    int filled = r->n_lines > 0 ? (int)(30 * done / r->n_lines) : 0;
    for (int i = 0; i < 30; i++) bar[i] = i < filled ? '#' : '.';
    bar[30] = 0;
    double rate = (double)s.output_tokens / spent;
    if (terminal) fprintf(stderr, "\r[%s] %lld/%s lines  %.0f tok/s  ETA %s\x1b[K", bar, (long long)done, total, rate, eta);
    else fprintf(stderr, "toka batch: %lld of %s lines, %.0f tok/s, ETA %s\n", (long long)done, total, rate, eta);
}

/* ---- Writer ---- */

/* All bytes in one write() where the system takes them so. */
static int run_write_all(run_state *r, run_sink *to, str s, toka_err *e) {
    for (size_t at = 0; at < s.n;) {
        ssize_t n = write(to->fd, s.p + at, s.n - at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            int why = errno;
            if (at && to->is_file && ftruncate(to->fd, to->bytes)) errno = why; /* else the next run cuts it */
            const char *next = to->is_file ? ", the same command goes on from there" : "";
            return fail(e, TOKA_E_IO, "%s: %s; %lld lines are written%s", to->path, strerror(why),
                        (long long)(r->n_before + r->n_written), next);
        }
        at += (size_t)n;
    }
    to->bytes += (int64_t)s.n;
    return 0;
}

static int run_write_line(run_state *r, run_line *line, buf *b, toka_err *e) {
    buf_clear(b);
    run_put_result(line, b);
    int code = run_write_all(r, line->error && r->errors.fd >= 0 ? &r->errors : &r->results, buf_view(b), e);
    if (code) return code;
    atomic_llong *count = line->error ? r->o->failed : r->o->completed;
    r->n_written++, r->n_errors += line->error != NULL;
    if (count) ++*count;
    return 0;
}

/* The first line of the queue with its records, in *ready; or NULL after 0.2 s. With run.lock held. */
static run_line *run_wait_for_line(run_state *r, buf *ready) {
    run_line *line = r->queue;
    if (line) {
        if (!(r->queue = line->next)) r->queue_end = &r->queue;
        buf empty = *ready;
        *ready = line->ready, line->ready = empty;
        line->queued = false;
        return line;
    }
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 200000000;
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_cond_timedwait(&r->wake, &r->lock, &until);
    return NULL;
}

static void run_leave(run_state *r, run_line *line) { /* with run.lock held */
    if (line->in_flight) {
        if (line->before) line->before->after = line->after;
        else r->flight = line->after;
        if (line->after) line->after->before = line->before;
    }
    r->n_flight_lines--, r->n_flight_samples -= MAX(line->call.n_choices, 1), r->n_flight_bytes -= (int64_t)line->bytes;
    run_line_free(line);
    pthread_cond_broadcast(&r->wake);
}

static bool run_must_stop(const run_state *r) { return *r->o->interrupted || (r->o->until && time(NULL) >= r->o->until); }

/* The writer: makes text of records, and writes the lines that ended without a device or Ctrl-C in their way, until all that was
 * read is written. */
static void run_write(run_state *r) {
    buf b = {0}, ready = {0};
    bool terminal = isatty(2), failed = false;
    toka_err e;
    pthread_mutex_lock(&r->lock);
    while (!r->read_all || r->n_flight_lines) {
        if (run_must_stop(r)) run_stop(r, NULL);
        run_line *line = run_wait_for_line(r, &ready);
        pthread_mutex_unlock(&r->lock);
        if (line && line->in_flight) api_feed(&line->call, buf_view(&ready), NULL);
        buf_clear(&ready);
        bool ended = line && (!line->in_flight || !line->call.n_left);
        bool whole = ended && (line->error || (line->in_flight && !line->call.broken));
        int code = whole && !failed ? run_write_line(r, line, &b, &e) : 0;
        run_progress(r, terminal);
        pthread_mutex_lock(&r->lock);
        if (code) failed = true, run_stop(r, &e);
        else if (ended && !whole && run_device_failed(r, &e)) run_stop(r, &e); /* where no more is read nobody else learns of it */
        if (ended) run_leave(r, line);
    }
    pthread_mutex_unlock(&r->lock);
    if (terminal && !r->o->quiet) fputs("\r\x1b[K", stderr);
    buf_free(&b), buf_free(&ready);
}

/* Its thread where this program drives the engine: then the driver may go home. */
static void *run_write_alone(void *user) {
    run_state *r = user;
    run_write(r);
    toka_stop(r->t);
    return NULL;
}

/* ---- Opening the files ---- */

/* custom_id of an output line into id. False: it is no line of ours. */
static bool run_read_result(str line, arena *a, buf *id) {
    toka_err ignored;
    const json *root = json_parse(a, line, json_trusted, &ignored), *v = json_get(root, "custom_id");
    if (!json_is(v, JSON_STRING) || !json_get(root, "response") || !json_get(root, "error")) return false;
    buf_clear(id), buf_str(id, json_str(v));
    return true;
}

/* Reads what earlier runs wrote; cuts a torn last line. Anything else that is no result is not ours to cut. */
static int run_scan_output(run_state *r, run_sink *to, atomic_llong *count, toka_err *e) {
    run_input in;
    str line, bad = {0};
    bool whole = false;
    int64_t at = 0;
    int code;
    buf id = {0}, kept = {0};
    if (count) *count = 0;
    run_input_init(&in, to->fd, to->path, r->o->interrupted);
    while ((code = run_next_line(&in, &line, &whole, e)) > 0) {
        arena a = {0};
        if (bad.p) {
            code = fail(e, TOKA_E_INPUT, "%s: line %lld is not a result of toka batch; give another -o", to->path,
                        (long long)in.number - 1);
            break;
        }
        if (whole && run_read_result(line, &a, &id)) {
            run_table_set(&r->seen, run_table_at(&r->seen, run_hash(buf_view(&id))), 1);
            at += (int64_t)line.n + 1;
            if (count) ++*count;
        } else { /* fine if it is the last */
            buf_clear(&kept), buf_put(&kept, line.p, MIN(line.n, (size_t)16));
            bad = buf_view(&kept);
        }
        arena_free(&a);
    }
    if (!code && *r->o->interrupted)
        code = fail(e, TOKA_E_CANCELLED, "%s: interrupted", to->path); /* the last line was cut by that */
    if (!code && bad.p && !at && bad.n && bad.p[0] != '{')
        code = fail(e, TOKA_E_INPUT, "%s: not a result file of toka batch; give another -o", to->path);
    if (!code && bad.p && ftruncate(to->fd, at)) code = fail(e, TOKA_E_IO, "%s: %s", to->path, strerror(errno));
    if (!code && bad.p && !r->o->quiet) fprintf(stderr, "toka batch: %s: the torn last line was cut off\n", to->path);
    to->bytes = at;
    run_input_free(&in), buf_free(&id), buf_free(&kept);
    return code;
}

static int run_open_output(run_state *r, run_sink *to, const char *path, atomic_llong *count, toka_err *e) {
    struct stat st, in;
    *to = (run_sink){.path = path, .fd = 1};
    if (!strcmp(path, "-")) return 0;
    to->fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, r->o->errors ? 0600 : 0666);
    if (to->fd < 0) to->fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC); /* a pipe, a device */
    if (to->fd < 0 || fstat(to->fd, &st)) return fail(e, TOKA_E_INPUT, "%s: %s", path, strerror(errno));
    if (!(to->is_file = S_ISREG(st.st_mode))) return 0;
    if (!fstat(r->in.fd, &in) && in.st_dev == st.st_dev && in.st_ino == st.st_ino)
        return fail(e, TOKA_E_USE, "%s is the input and the output", path);
    struct flock whole_file = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    for (int tries = 0; fcntl(to->fd, F_SETLK, &whole_file) && (errno == EACCES || errno == EAGAIN); tries++) {
        if (tries == 30 || atomic_load(r->o->interrupted))
            return fail(e, TOKA_E_USE, "%s: another toka batch is writing it", path);
        usleep(100000); /* one that was killed a moment ago holds it until the system has taken it apart */
    }
    return run_scan_output(r, to, count, e);
}

/* The first pass over the input: every custom_id once. A pipe is read only once, so its ids are checked as they come. */
static int run_scan_input(run_state *r, toka_err *e) {
    str line;
    struct stat st;
    buf id = {0};
    int code;
    r->n_lines = -1;
    if (fstat(r->in.fd, &st) || !S_ISREG(st.st_mode)) {
        if (!r->o->quiet)
            fprintf(stderr, "toka batch: %s cannot be read twice: a second custom_id is found when it comes\n", r->in.name);
        return 0;
    }
    int64_t n = 0;
    while ((code = run_next_line(&r->in, &line, NULL, e)) > 0) {
        arena a = {0};
        toka_err ignored;
        if (run_is_blank(line)) continue;
        run_identify(r->in.too_long ? NULL : json_parse(&a, line, run_limits, &ignored), r->in.number, &id);
        arena_free(&a);
        run_seen *s = run_table_at(&r->seen, run_hash(buf_view(&id)));
        if (s->state >> 1) {
            code = run_twice(r, r->in.number, s, buf_view(&id), e);
            break;
        }
        r->n_before += s->state & 1;
        run_table_set(&r->seen, s, (uint64_t)r->in.number << 1 | (s->state & 1));
        n++;
    }
    buf_free(&id);
    if (code < 0) return code;
    if (lseek(r->in.fd, 0, SEEK_SET) != 0) return fail(e, TOKA_E_IO, "%s: %s", r->in.name, strerror(errno));
    r->in.at = r->in.n = 0, r->in.number = 0, r->n_lines = n;
    return 0;
}

static int run_open(run_state *r, toka_err *e) {
    bool standard = !strcmp(r->o->in, "-");
    int fd = standard ? 0 : open(r->o->in, O_RDONLY | O_CLOEXEC);
    r->results.fd = r->errors.fd = -1;
    run_input_init(&r->in, fd, standard ? "standard input" : r->o->in, r->o->interrupted);
    if (fd < 0) return fail(e, TOKA_E_INPUT, "%s: %s", r->o->in, strerror(errno));
    int code = run_open_output(r, &r->results, r->o->out, r->o->completed, e);
    if (!code && r->o->errors) code = run_open_output(r, &r->errors, r->o->errors, r->o->failed, e);
    return code ? code : run_scan_input(r, e);
}

static int run_close(run_state *r, toka_err *e) {
    int code = 0;
    run_sink *sinks[] = {&r->results, &r->errors};
    for (int i = 0; i < COUNT(sinks); i++) {
        run_sink *to = sinks[i];
        if (to->is_file && fsync(to->fd) && errno != EINVAL) code = fail(e, TOKA_E_IO, "%s: %s", to->path, strerror(errno));
        if (to->fd > 1) close(to->fd);
    }
    if (r->in.fd > 0) close(r->in.fd);
    run_input_free(&r->in), buf_free(&r->warned);
    free(r->seen.at);
    pthread_mutex_destroy(&r->lock), pthread_cond_destroy(&r->wake);
    return code;
}

/* ---- The closing report ---- */

/* What the machine can do, measured for a tenth of a second each when a batch has ended: reading out of memory of the
 * weights' size (at most 256 MB of it; small weights stay in the cache, here as there), each thread its own part again and
 * again; and multiply-adds in registers. A step takes at least as long as either of the two. */
enum { RUN_PROBE_THREADS = 64, RUN_FMA_FLOATS = 192 };

typedef struct run_probe { /* one thread's share */
    const uint64_t *p; /* [n_words]; NULL: arithmetic */
    size_t n_words;
    toka_device *device;
    uint64_t sum;      /* what was read, so that reading is not left out */
    double best;       /* bytes or floating-point operations a second, of the fastest round: other programs run here too */
} run_probe;

#ifdef __x86_64__
#define RUN_FMA(name, target, type, set, load, fma, store, width) \
    target static void name(float *x, int rounds) { \
        type y[RUN_FMA_FLOATS / 16], a = set(0.5f), b = set(0.25f); \
        for (int i = 0; i < COUNT(y); i++) y[i] = load(x + i * (width)); \
        while (rounds--) { \
            _Pragma("GCC unroll 12") for (int i = 0; i < COUNT(y); i++) y[i] = fma(y[i], a, b); \
        } \
        for (int i = 0; i < COUNT(y); i++) store(x + i * (width), y[i]); \
    }
RUN_FMA(run_fma_avx2, CPU_AVX2, __m256, _mm256_set1_ps, _mm256_loadu_ps, _mm256_fmadd_ps, _mm256_storeu_ps, 8)
RUN_FMA(run_fma_avx512, CPU_AVX512, __m512, _mm512_set1_ps, _mm512_loadu_ps, _mm512_fmadd_ps, _mm512_storeu_ps, 16)
#endif

static void run_fma_c(float *x, int rounds) {
    while (rounds--)
        for (int i = 0; i < RUN_FMA_FLOATS; i++) x[i] = x[i] * 0.5f + 0.25f;
}

/* With the instructions that the backend uses; returns the operations done. */
static double run_fma(const toka_device *d, float x[RUN_FMA_FLOATS]) {
    enum { ROUNDS = 10000 };
#ifdef __x86_64__
    if (!strcmp(d->kernels->name, "AVX-512")) return run_fma_avx512(x, ROUNDS), 2.0 * ROUNDS * RUN_FMA_FLOATS;
    if (!strcmp(d->kernels->name, "AVX2")) return run_fma_avx2(x, ROUNDS), (double)ROUNDS * RUN_FMA_FLOATS;
#endif
    (void)d;
    return run_fma_c(x, ROUNDS), 2.0 * ROUNDS * RUN_FMA_FLOATS;
}

static void *run_probe_share(void *user) {
    run_probe *w = user;
    uint64_t sum[8] = {0};
    float x[RUN_FMA_FLOATS] = {0};
    double now = os_now(), end = now + 0.1, before;
    do {
        before = now;
        for (size_t i = 0; i + 8 <= w->n_words; i += 8)
            for (int k = 0; k < 8; k++) sum[k] += w->p[i + (size_t)k];
        double done = w->p ? (double)(w->n_words * sizeof *w->p) : run_fma(w->device, x);
        now = os_now();
        w->best = MAX(w->best, done / (now - before));
    } while (now < end);
    for (int k = 0; k < 8; k++) w->sum += sum[k];
    return NULL;
}

/* Bytes a second if bytes > 0, else floating-point operations a second, of all the backend's threads. */
static double run_probe_rate(toka_device *d, size_t bytes) {
    run_probe w[RUN_PROBE_THREADS] = {{0}};
    pthread_t thread[RUN_PROBE_THREADS];
    size_t words = MIN(bytes, (size_t)256 << 20) / sizeof(uint64_t);
    int n = MIN(d->pool.n, RUN_PROBE_THREADS), started = 1;
    uint64_t *p = bytes ? mem_alloc(words * sizeof *p) : NULL;
    double rate = 0;
    if (p) memset(p, 1, words * sizeof *p);
    for (int i = 0; i < n; i++)
        w[i] = (run_probe){p ? p + words / (size_t)n * (size_t)i : NULL, words / (size_t)n, d, 0, 0};
    while (started < n && !pthread_create(&thread[started], NULL, run_probe_share, &w[started])) started++;
    run_probe_share(&w[0]);
    for (int i = 1; i < started; i++) pthread_join(thread[i], NULL);
    for (int i = 0; i < started; i++) rate += w[i].best;
    free(p);
    return rate;
}

typedef struct run_report { /* what a batch was worth */
    double elapsed_s, output_rate, total_rate, shared, rows_per_step, plan, run, commit, idle; /* shares of elapsed_s */
    double read_gbs, gflops; /* weights read by the steps, arithmetic on them: 10^9 bytes and operations a second of run */
    double most_gbs, most_gflops, ceiling; /* what the machine can; the larger of the two shares. 0 on a GPU */
    toka_stats s;
} run_report;

static run_report run_report_make(toka *t, double elapsed_s) {
    run_report p = {.s = toka_get_stats(t), .elapsed_s = MAX(elapsed_s, 1e-9)};
    const toka_stats *s = &p.s;
    const mf_model *files = t->files;
    const double head = (double)files->shape.V * files->shape.E, tied = files->weights.lm_head.data == files->weights.embed.data;
    const double body = (double)files->n_parameters - (tied ? head : 2 * head);
    p.output_rate = (double)s->output_tokens / p.elapsed_s;
    p.total_rate = (double)(s->output_tokens + s->prompt_tokens) / p.elapsed_s;
    p.shared = s->prompt_tokens ? (double)s->prompt_tokens_shared / (double)s->prompt_tokens : 0;
    p.rows_per_step = s->steps ? (double)s->rows / (double)s->steps : 0;
    p.plan = s->plan_s / p.elapsed_s, p.run = s->run_s / p.elapsed_s, p.commit = s->commit_s / p.elapsed_s;
    p.idle = MAX(0.0, 1 - p.run);
    if (s->run_s > 0) {
        double bytes = (double)files->weight_bytes * (body + head) / (double)files->n_parameters; /* no step reads all of embed */
        p.read_gbs = 1e-9 * bytes * (double)s->steps / s->run_s;
        p.gflops = 2e-9 * (body * (double)s->rows + head * (double)s->output_tokens) / s->run_s;
    }
    if (t->engine->be == &toka_cpu && s->steps) {
        p.most_gbs = 1e-9 * run_probe_rate(t->engine->replicas[0].m.ranks[0].dev, files->weight_bytes);
        p.most_gflops = 1e-9 * run_probe_rate(t->engine->replicas[0].m.ranks[0].dev, 0);
        p.ceiling = MAX(p.read_gbs / p.most_gbs, p.gflops / p.most_gflops);
    }
    return p;
}

static void run_report_show(const run_report *p) {
    const toka_stats *s = &p->s;
    if (!s->steps) return;
    fprintf(stderr,
            "  prompt %lld tokens, %.1f %% from the prefix tree; output %lld tokens, %.1f tok/s; %.1f tok/s in all\n"
            "  %lld steps of %.1f tokens, %lld preemptions; device busy %.1f %%, idle %.1f %%; beside it planning %.1f %%, events %.1f %%\n",
            (long long)s->prompt_tokens, 100 * p->shared, (long long)s->output_tokens, p->output_rate, p->total_rate,
            (long long)s->steps, p->rows_per_step, (long long)s->preemptions, 100 * p->run, 100 * p->idle, 100 * p->plan,
            100 * p->commit);
    if (p->ceiling > 0)
        fprintf(stderr, "  weights were read at %.1f of %.1f GB/s and used at %.1f of %.1f GFLOP/s: %.0f %% of the ceiling\n",
                p->read_gbs, p->most_gbs, p->gflops, p->most_gflops, 100 * p->ceiling);
}

/* The same as a JSON object, times in seconds, rates per second, shares from 0 to 1. */
static int run_report_write(const run_state *r, const run_report *p, toka_err *e) {
    const toka_stats *s = &p->s;
    const struct { const char *name; int64_t value; } counts[] = {
        {"lines", r->n_written}, {"errors", r->n_errors}, {"done_before", r->n_before}, {"prompt_tokens", s->prompt_tokens},
        {"prompt_tokens_shared", s->prompt_tokens_shared}, {"output_tokens", s->output_tokens}, {"steps", s->steps},
        {"rows", s->rows}, {"preemptions", s->preemptions}, {"kv_pages", s->kv_pages}};
    const struct { const char *name; double value; } numbers[] = {
        {"elapsed_time", p->elapsed_s}, {"output_tokens_per_second", p->output_rate}, {"tokens_per_second", p->total_rate},
        {"prefix_hit_share", p->shared}, {"mean_batch_size", p->rows_per_step}, {"plan_share", p->plan}, {"run_share", p->run},
        {"commit_share", p->commit}, {"idle_share", p->idle}, {"weights_gb_per_second", p->read_gbs},
        {"most_gb_per_second", p->most_gbs}, {"gflops", p->gflops}, {"most_gflops", p->most_gflops},
        {"ceiling_share", p->ceiling}};
    buf b = {0};
    json_put_open(&b, '{');
    for (int i = 0; i < COUNT(counts); i++) json_put_key(&b, counts[i].name), json_put_int(&b, counts[i].value);
    for (int i = 0; i < COUNT(numbers); i++) json_put_key(&b, numbers[i].name), json_put_num(&b, numbers[i].value, true);
    buf_c(&b, "}\n");
    FILE *f = fopen(r->o->report, "w");
    bool good = f && fwrite(b.p, 1, b.n, f) == b.n;
    if (f) good &= !fclose(f);
    buf_free(&b);
    return good ? 0 : fail(e, TOKA_E_IO, "%s: %s", r->o->report, strerror(errno));
}

/* ---- toka batch ---- */

/* The three threads, from the first line to the last. */
static int run_lines(run_state *r, toka_err *e) {
    pthread_t reader, writer;
    toka_err why;
    if (pthread_create(&reader, NULL, run_read, r)) return fail(e, TOKA_E_IO, "cannot start a thread: %s", strerror(errno));
    bool writes = !pthread_create(&writer, NULL, run_write_alone, r);
    int code = writes ? toka_run(r->t, true, &why) : fail(&why, TOKA_E_IO, "cannot start a thread: %s", strerror(errno));
    if (code) {
        pthread_mutex_lock(&r->lock);
        run_stop(r, &why);
        pthread_mutex_unlock(&r->lock);
    }
    pthread_join(reader, NULL);
    if (writes) pthread_join(writer, NULL);
    if (r->e.code) *e = r->e;
    if (r->e.code == TOKA_E_DEVICE && r->results.is_file)
        fail(e, TOKA_E_DEVICE, "%.300s; %lld lines are written, the same command goes on from there", r->e.msg,
             (long long)(r->n_before + r->n_written));
    return r->e.code;
}

static void run_init(run_state *r, toka *t, const run_options *o) {
    *r = (run_state){.o = o, .t = t, .t0 = os_now()};
    r->t_shown = r->t0;
    r->queue_end = &r->queue;
    run_models(r);
    pthread_mutex_init(&r->lock, NULL), pthread_cond_init(&r->wake, NULL);
}

static int run_batch(toka *t, const run_options *o, toka_err *e) {
    run_state r;
    toka_err late;
    run_init(&r, t, o);
    int code = run_open(&r, e);
    if (!code) {
        r.t0 = os_now();
        code = run_lines(&r, e);
        run_report p = run_report_make(t, os_now() - r.t0);
        if (!o->quiet) {
            fprintf(stderr, "toka batch: %lld lines in %.1f s, %lld of them errors", (long long)r.n_written, p.elapsed_s,
                    (long long)r.n_errors);
            fprintf(stderr, r.n_before ? "; %lld were done before\n" : "\n", (long long)r.n_before);
            run_report_show(&p);
        }
        if (o->report && run_report_write(&r, &p, &late) && !code) *e = late, code = late.code;
    }
    if (run_close(&r, &late) && !code) *e = late, code = late.code;
    return code;
}

/* The same where somebody else drives the engine, on the caller's thread. *all: every line has its result or error. */
static int run_served(toka *t, const run_options *o, bool *all, toka_err *e) {
    run_state r;
    toka_err late;
    pthread_t reader;
    run_init(&r, t, o);
    int code = run_open(&r, e);
    if (!code && pthread_create(&reader, NULL, run_read, &r)) {
        code = fail(e, TOKA_E_IO, "cannot start a thread: %s", strerror(errno));
    } else if (!code) {
        run_write(&r);
        pthread_join(reader, NULL);
        if (r.e.code) *e = r.e, code = e->code;
    }
    *all = !code && !r.stopped && !*o->interrupted;
    if (run_close(&r, &late) && !code) *e = late, code = late.code;
    return code;
}

/* ===========================================================================
 * MARK: 23. Files and batches [os]
 * /v1/files and /v1/batches as OpenAI defines them, kept in one folder, so that a server that was killed at any moment goes on
 * where it stopped. What a batch does is chapter 22's: the lines of its input file run as those of `toka batch` do, and what is
 * in its two output files is not done again.
 *
 *     lock             held by the one server that uses the folder
 *     file-<32 hex>    contents of a file; .json beside it: what it is. A file exists once its .json does
 *     batch_<32 hex>.json   a batch: its object, and under "toka" what the object does not say
 *     *.part           an upload or a record under way; removed at start
 *
 * The life of a batch; each state is on disk before anybody hears of it:
 *
 *     fb_create --> validating --fb_validate--> in_progress --fb_run_lines--> finalizing --fb_finish--> completed
 *                       |  input is no batch         |   time is up: what is left becomes errors ------> expired
 *                       v                            v   fb_cancel
 *                     failed                     cancelling --fb_finish--> cancelled
 *
 * One batch runs at a time, the oldest first, in a thread of its own (fb_work); its requests stand behind all others in the
 * engine's queue. Records are written to a new file that takes the old one's place (fb_save), so one is whole or not there. A
 * step that was cut short is done again from its beginning: each leads to the same end however often it runs.
 *
 * Nothing a client sends becomes part of a path: ids are made here (fb_new_id: microseconds since 1970, then 64 random bits, so
 * that their order is that of creation), and an id that comes in is looked up in a table. Sizes and counts have bounds (FB_
 * enums). store.lock guards the tables, all records and `running`; fb_work holds it only between steps. Order of locks:
 * store.lock, run.lock.
 * =========================================================================== */

enum { FB_BODY_BYTES = 1 << 20, FB_MAX_FILES = 100000, FB_MAX_BATCHES = 100000, FB_MAX_LINES = 10000000, FB_MAX_ERRORS = 20,
       FB_ID_HEX = 32, FB_MAX_DAYS = 30, FB_NAME_BYTES = 512,
       FB_PRIORITY = -1000 /* of a batch's requests: a million steps behind those of a client that waits */ };
#define FB_FILE_BYTES ((int64_t)4 << 30)
static const json_limits fb_limits = {32, FB_BODY_BYTES};

typedef struct fb_id {
    char z[8 + FB_ID_HEX]; /* "file-" or "batch_", then hex digits; "" is none */
} fb_id;

typedef struct fb_file {
    fb_id id;
    int64_t bytes, created_at;
    char *name;          /* what the client called it; only ever shown */
    const char *purpose; /* one of fb_purposes */
} fb_file;

enum fb_status { FB_VALIDATING, FB_FAILED, FB_IN_PROGRESS, FB_FINALIZING, FB_COMPLETED, FB_EXPIRED, FB_CANCELLING, FB_CANCELLED,
                 FB_STATUSES };

typedef struct fb_batch {
    fb_id id, input, out, err; /* out, err: files of results and of errors; in the file table once the batch has ended */
    enum fb_status status;
    bool chat;                 /* endpoint: /v1/chat/completions, else /v1/completions */
    char window[16];           /* completion_window as given: "24h" */
    int64_t at[FB_STATUSES];   /* when it came into each state, unix seconds; 0: never. at[FB_VALIDATING]: created */
    int64_t expires_at;
    char *model;               /* that it was made for: another does not run it */
    char *metadata, *errors;   /* JSON: an object; a list of errors */
    bool has_out, has_err;     /* they are files now */
    atomic_llong total, completed, failed;
    atomic_int stop;           /* asks chapter 22 to stop: cancelled, out of time, or the server ends */
} fb_batch;

typedef struct fb_options {
    const char *dir;    /* folder; NULL: $XDG_DATA_HOME/toka/files or ~/.local/share/toka/files; "off": none */
    toka *t;            /* somebody else drives it until fb_close has returned */
    const api_model *m; /* what bodies are read against; its first name is the model of batches */
} fb_options;

typedef struct fb_store {
    fb_options o;
    char *path;      /* of the folder; NULL: there is none */
    toka_err why;    /* why it cannot be used; code 0: it can */
    int dir, locked; /* descriptors, -1 before the folder is there */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    fb_file *files;  /* [n_files] oldest first, as are batches */
    fb_batch **batches;
    size_t n_files, cap_files, n_batches, cap_batches;
    fb_batch *running;
    int64_t last_us; /* of the newest id */
    bool stopping, started;
    pthread_t worker;
} fb_store;

static const char *const fb_status_names[FB_STATUSES] = {"validating", "failed", "in_progress", "finalizing",
                                                         "completed", "expired", "cancelling", "cancelled"};
static const char *const fb_purposes[] = {"batch", "batch_output", "fine-tune", "assistants", "vision", "user_data", "evals"};

static bool fb_has_ended(const fb_batch *b) {
    return b->status == FB_FAILED || b->status == FB_COMPLETED || b->status == FB_EXPIRED || b->status == FB_CANCELLED;
}

/* ---- Multipart forms (RFC 7578), pure: bytes in any pieces, parts out ---- */

enum fb_form_event { FB_FORM_MORE, FB_FORM_PART, FB_FORM_DATA, FB_FORM_PART_END, FB_FORM_END, FB_FORM_BAD };
enum fb_form_state { FB_FORM_PREAMBLE, FB_FORM_BODY, FB_FORM_MARK, FB_FORM_HEAD, FB_FORM_DONE };

typedef struct fb_form {
    enum fb_form_state state;
    char mark[4 + 70]; /* CR LF - - boundary: what ends a part */
    size_t n_mark, matched; /* of it, at the end of what was taken so far */
    buf head;           /* headers of the part */
    buf name, filename; /* of the part */
    bool is_file;       /* it has a filename */
} fb_form;

enum { FB_HEAD_BYTES = 8192 };

/* The value of a parameter of a header line: name="..." or name=..., behind a ';'. False: there is none. */
static bool fb_parameter(str line, const char *name, buf *out) {
    bool quoted = false;
    for (size_t i = 0; i < line.n; i++) {
        quoted ^= line.p[i] == '"';
        if (quoted && line.p[i] == '\\') i++;
        if (quoted || line.p[i] != ';') continue;
        for (i++; i < line.n && (line.p[i] == ' ' || line.p[i] == '\t'); i++) {}
        size_t from = i + strlen(name);
        if (from >= line.n || strncasecmp(line.p + i, name, strlen(name)) || line.p[from] != '=') {
            i--;
            continue;
        }
        quoted = ++from < line.n && line.p[from] == '"';
        buf_clear(out);
        for (from += quoted; from < line.n && (quoted ? line.p[from] != '"' : !strchr("; \t\r", line.p[from])); from++) {
            if (quoted && line.p[from] == '\\' && from + 1 < line.n && strchr("\"\\", line.p[from + 1])) from++;
            buf_char(out, line.p[from]);
        }
        return true;
    }
    return false;
}

/* content_type: the request's. False: it is no form, or its boundary is not one. */
static bool fb_form_init(fb_form *f, str content_type) {
    static const char type[] = "multipart/form-data";
    buf boundary = {0};
    *f = (fb_form){.matched = 2}; /* the first mark needs no line end before it */
    bool good = content_type.n >= sizeof type - 1 && !strncasecmp(content_type.p, type, sizeof type - 1) &&
                fb_parameter(content_type, "boundary", &boundary) && boundary.n >= 1 && boundary.n <= 70;
    for (size_t i = 0; i < boundary.n && good; i++) good = boundary.p[i] >= ' ' && boundary.p[i] < 0x7F;
    if (good) {
        memcpy(f->mark, "\r\n--", 4), memcpy(f->mark + 4, boundary.p, boundary.n);
        f->n_mark = 4 + boundary.n;
    }
    buf_free(&boundary);
    return good;
}
static void fb_form_free(fb_form *f) { buf_free(&f->head), buf_free(&f->name), buf_free(&f->filename); }

/* Bytes before the next mark. A CR stands only at its beginning, so a match that fails can only begin anew at the byte that
 * failed. */
static size_t fb_form_scan(fb_form *f, str in, str *data, enum fb_form_event *event) {
    size_t at = 0;
    *event = FB_FORM_MORE;
    if (!f->matched) {
        const char *cr = memchr(in.p, '\r', in.n);
        at = cr ? (size_t)(cr - in.p) : in.n;
        *data = str_sub(in, 0, at);
        if (at) {
            if (f->state == FB_FORM_BODY) *event = FB_FORM_DATA;
            return at;
        }
    }
    while (at < in.n && f->matched < f->n_mark && in.p[at] == f->mark[f->matched]) at++, f->matched++;
    if (f->matched == f->n_mark) {
        if (f->state == FB_FORM_BODY) *event = FB_FORM_PART_END;
        f->state = FB_FORM_MARK, f->matched = 0;
        buf_clear(&f->head);
    } else if (at < in.n) { /* it was none: what matched is data */
        *data = (str){f->mark, f->matched};
        if (f->state == FB_FORM_BODY) *event = FB_FORM_DATA;
        f->matched = 0;
    }
    return at;
}

static bool fb_form_headers(fb_form *f) { /* head is whole: lines, each with CR LF */
    static const char disposition[] = "content-disposition:";
    for (str rest = buf_view(&f->head), line; rest.n; rest = str_sub(rest, MIN(line.n + 1, rest.n), rest.n)) {
        const char *feed = memchr(rest.p, '\n', rest.n);
        line = str_sub(rest, 0, feed ? (size_t)(feed - rest.p) : rest.n);
        if (line.n < sizeof disposition - 1 || strncasecmp(line.p, disposition, sizeof disposition - 1)) continue;
        f->is_file = fb_parameter(line, "filename", &f->filename);
        return fb_parameter(line, "name", &f->name);
    }
    return false;
}

/* Behind a mark: "--" ends the form, CR LF opens a part. */
static enum fb_form_event fb_form_mark(fb_form *f, char c) {
    buf_char(&f->head, c);
    str got = buf_view(&f->head);
    if (str_is(got, "--")) return f->state = FB_FORM_DONE, FB_FORM_END;
    if (str_ends(got, STR("\r\n"))) {
        f->state = FB_FORM_HEAD;
        buf_clear(&f->head);
        return FB_FORM_MORE;
    }
    bool fine = got.n < 32 && (c == ' ' || c == '\t' || c == '\r' || (c == '-' && got.n == 1)); /* padding is allowed */
    return fine ? FB_FORM_MORE : FB_FORM_BAD;
}

/* Takes bytes; *used says how many. MORE: go on with the rest, or with the next piece; PART: f->name, f->filename are those of a
 * new part; DATA: *data belongs to it (valid until the next call); PART_END; END: the form is whole, what follows is ignored. (A
 * mark that turns out to be none gives data without taking a byte: *used is 0 then, but never twice.) */
static enum fb_form_event fb_form_take(fb_form *f, str in, size_t *used, str *data) {
    enum fb_form_event event = FB_FORM_MORE;
    *data = STR("");
    *used = in.n ? 1 : 0;
    if (!in.n) return FB_FORM_MORE;
    if (f->state == FB_FORM_PREAMBLE || f->state == FB_FORM_BODY) return *used = fb_form_scan(f, in, data, &event), event;
    if (f->state == FB_FORM_MARK) return fb_form_mark(f, in.p[0]);
    if (f->state == FB_FORM_DONE) return *used = in.n, FB_FORM_MORE;
    buf_char(&f->head, in.p[0]);
    if (f->head.n > FB_HEAD_BYTES) return FB_FORM_BAD;
    bool none = str_is(buf_view(&f->head), "\r\n");
    if (!none && !str_ends(buf_view(&f->head), STR("\r\n\r\n"))) return FB_FORM_MORE;
    f->state = FB_FORM_BODY;
    f->matched = 0;
    return fb_form_headers(f) ? FB_FORM_PART : FB_FORM_BAD;
}

/* ---- Ids, tables, and their records on disk ---- */

static int64_t fb_now(void) { return (int64_t)time(NULL); }

/* With store.lock held. */
static fb_id fb_new_id(fb_store *s, const char *prefix) {
    fb_id id;
    struct timespec t;
    uint64_t noise = 0;
    clock_gettime(CLOCK_REALTIME, &t);
    s->last_us = MAX(s->last_us + 1, (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000);
    while (getrandom(&noise, sizeof noise, 0) != sizeof noise) {}
    snprintf(id.z, sizeof id.z, "%s%016llx%016llx", prefix, (unsigned long long)s->last_us, (unsigned long long)noise);
    return id;
}

/* An id as it comes in: the prefix and 32 lower-case hex digits, nothing else. */
static bool fb_read_id(str text, const char *prefix, fb_id *id) {
    size_t n = strlen(prefix);
    *id = (fb_id){{0}};
    if (text.n != n + FB_ID_HEX || !str_starts(text, str_c(prefix))) return false;
    for (size_t i = n; i < text.n; i++)
        if (!strchr("0123456789abcdef", text.p[i]) || !text.p[i]) return false;
    memcpy(id->z, text.p, text.n);
    return true;
}

/* Index of the first entry whose id's digits are not below; ids of one table have one prefix. */
static size_t fb_file_at(const fb_store *s, const fb_id *id) {
    size_t lo = 0, hi = s->n_files;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (strcmp(s->files[mid].id.z, id->z) < 0) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}
static size_t fb_batch_at(const fb_store *s, const fb_id *id) {
    size_t lo = 0, hi = s->n_batches;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (strcmp(s->batches[mid]->id.z, id->z) < 0) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}
static fb_file *fb_find_file(const fb_store *s, const fb_id *id) {
    size_t i = fb_file_at(s, id);
    return i < s->n_files && !strcmp(s->files[i].id.z, id->z) ? &s->files[i] : NULL;
}
static fb_batch *fb_find_batch(const fb_store *s, const fb_id *id) {
    size_t i = fb_batch_at(s, id);
    return i < s->n_batches && !strcmp(s->batches[i]->id.z, id->z) ? s->batches[i] : NULL;
}

static void fb_insert_file(fb_store *s, fb_file f) {
    size_t i = fb_file_at(s, &f.id);
    if (s->n_files == s->cap_files) {
        s->cap_files = MAX((size_t)64, 2 * s->cap_files);
        s->files = mem_realloc(s->files, s->cap_files * sizeof *s->files);
    }
    memmove(&s->files[i + 1], &s->files[i], (s->n_files++ - i) * sizeof *s->files);
    s->files[i] = f;
}
static void fb_insert_batch(fb_store *s, fb_batch *b) {
    size_t i = fb_batch_at(s, &b->id);
    if (s->n_batches == s->cap_batches) {
        s->cap_batches = MAX((size_t)64, 2 * s->cap_batches);
        s->batches = mem_realloc(s->batches, s->cap_batches * sizeof *s->batches);
    }
    memmove(&s->batches[i + 1], &s->batches[i], (s->n_batches++ - i) * sizeof *s->batches);
    s->batches[i] = b;
}

static void fb_batch_del(fb_batch *b) { free(b->model), free(b->metadata), free(b->errors), free(b); }

static const char *fb_purpose(str name) { /* NULL: unknown */
    for (int i = 0; i < COUNT(fb_purposes); i++)
        if (str_is(name, fb_purposes[i])) return fb_purposes[i];
    return NULL;
}

static void fb_put_file(const fb_file *f, buf *b) {
    json_put_open(b, '{');
    json_put_key(b, "id"), json_put_str(b, str_c(f->id.z));
    json_put_key(b, "object"), json_put_str(b, STR("file"));
    json_put_key(b, "bytes"), json_put_int(b, f->bytes);
    json_put_key(b, "created_at"), json_put_int(b, f->created_at);
    json_put_key(b, "filename"), json_put_str(b, str_c(f->name));
    json_put_key(b, "purpose"), json_put_str(b, str_c(f->purpose));
    json_put_key(b, "status"), json_put_str(b, STR("processed"));
    json_put_close(b, '}');
}

static void fb_put_id_or_null(buf *b, const char *name, bool there, const fb_id *id) {
    json_put_key(b, name);
    if (there) json_put_str(b, str_c(id->z));
    else json_put_null(b);
}

/* A batch object without its closing brace. */
static void fb_put_batch(const fb_batch *x, buf *b) {
    static const struct {
        const char *name;
        enum fb_status status;
    } times[] = {{"in_progress_at", FB_IN_PROGRESS}, {"finalizing_at", FB_FINALIZING}, {"completed_at", FB_COMPLETED},
                 {"failed_at", FB_FAILED}, {"expired_at", FB_EXPIRED}, {"cancelling_at", FB_CANCELLING},
                 {"cancelled_at", FB_CANCELLED}};
    json_put_open(b, '{');
    json_put_key(b, "id"), json_put_str(b, str_c(x->id.z));
    json_put_key(b, "object"), json_put_str(b, STR("batch"));
    json_put_key(b, "endpoint"), json_put_str(b, x->chat ? STR("/v1/chat/completions") : STR("/v1/completions"));
    json_put_key(b, "model"), json_put_str(b, str_c(x->model));
    json_put_key(b, "errors"), json_comma(b);
    if (x->errors) buf_printf(b, "{\"object\":\"list\",\"data\":%s}", x->errors);
    else buf_c(b, "null");
    json_put_key(b, "input_file_id"), json_put_str(b, str_c(x->input.z));
    json_put_key(b, "completion_window"), json_put_str(b, str_c(x->window));
    json_put_key(b, "status"), json_put_str(b, str_c(fb_status_names[x->status]));
    fb_put_id_or_null(b, "output_file_id", x->has_out, &x->out);
    fb_put_id_or_null(b, "error_file_id", x->has_err, &x->err);
    json_put_key(b, "created_at"), json_put_int(b, x->at[FB_VALIDATING]);
    json_put_key(b, "expires_at"), json_put_int(b, x->expires_at);
    for (int i = 0; i < COUNT(times); i++) {
        json_put_key(b, times[i].name);
        if (x->at[times[i].status]) json_put_int(b, x->at[times[i].status]);
        else json_put_null(b);
    }
    json_put_key(b, "request_counts"), json_put_open(b, '{');
    json_put_key(b, "total"), json_put_int(b, x->total);
    json_put_key(b, "completed"), json_put_int(b, x->completed);
    json_put_key(b, "failed"), json_put_int(b, x->failed);
    json_put_close(b, '}');
    json_put_key(b, "metadata"), json_comma(b), buf_c(b, x->metadata ? x->metadata : "null");
}

/* Writes a record: whole, on disk, and then in the old one's place. */
static int fb_save(fb_store *s, const fb_id *id, str record, toka_err *e) {
    char part[64], name[64];
    snprintf(part, sizeof part, "%s.json.part", id->z), snprintf(name, sizeof name, "%s.json", id->z);
    int fd = openat(s->dir, part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    bool good = fd >= 0;
    for (size_t at = 0; good && at < record.n;) {
        ssize_t n = write(fd, record.p + at, record.n - at);
        good = n > 0 || (n < 0 && errno == EINTR);
        if (n > 0) at += (size_t)n;
    }
    good = good && !fsync(fd) && !renameat(s->dir, part, s->dir, name) && !fsync(s->dir);
    int why = errno;
    if (fd >= 0) close(fd);
    return good ? 0 : fail(e, TOKA_E_IO, "%s: %s", s->path, strerror(why));
}

static int fb_save_file(fb_store *s, const fb_file *f, toka_err *e) {
    buf b = {0};
    fb_put_file(f, &b);
    int code = fb_save(s, &f->id, buf_view(&b), e);
    buf_free(&b);
    return code;
}

static int fb_save_batch(fb_store *s, const fb_batch *x, toka_err *e) {
    buf b = {0};
    fb_put_batch(x, &b);
    json_put_key(&b, "toka"), json_put_open(&b, '{');
    json_put_key(&b, "output"), json_put_str(&b, str_c(x->out.z));
    json_put_key(&b, "errors"), json_put_str(&b, str_c(x->err.z));
    buf_c(&b, "}}");
    int code = fb_save(s, &x->id, buf_view(&b), e);
    buf_free(&b);
    return code;
}

/* Into a state, now, on disk too. With store.lock held. What cannot be written is told on standard error and written with the
 * next. */
static void fb_enter(fb_store *s, fb_batch *b, enum fb_status status) {
    toka_err e;
    b->status = status;
    if (!b->at[status]) b->at[status] = fb_now();
    if (fb_save_batch(s, b, &e)) fprintf(stderr, "toka serve: %s: %s\n", b->id.z, e.msg);
}

/* ---- Reading the folder ---- */

static char *fb_text(const json *v) { /* a JSON value as text, on the heap; NULL of null */
    buf b = {0};
    if (!v || v->type == JSON_NULL) return NULL;
    json_put_value(&b, v);
    return b.p;
}
static char *fb_copy(str s) { return mem_check(strndup(s.p, s.n)); }

static bool fb_load_file(fb_store *s, const fb_id *id, const json *root) {
    struct stat st;
    const char *purpose = fb_purpose(json_str(json_get(root, "purpose")));
    if (!purpose || fstatat(s->dir, id->z, &st, AT_SYMLINK_NOFOLLOW) || !S_ISREG(st.st_mode)) return false;
    fb_insert_file(s, (fb_file){*id, (int64_t)st.st_size, json_int(json_get(root, "created_at"), 0),
                                fb_copy(json_str(json_get(root, "filename"))), purpose});
    return true;
}

static int fb_read_status(const json *root) { /* -1: none of ours */
    for (int i = 0; i < FB_STATUSES; i++)
        if (str_is(json_str(json_get(root, "status")), fb_status_names[i])) return i;
    return -1;
}

static bool fb_load_batch(fb_store *s, const fb_id *id, const json *root) {
    const json *own = json_get(root, "toka"), *counts = json_get(root, "request_counts");
    str window = json_str(json_get(root, "completion_window"));
    fb_batch *b = mem_zalloc(sizeof *b);
    int status = fb_read_status(root);
    b->id = *id;
    bool good = status >= 0 && window.n < sizeof b->window &&
                fb_read_id(json_str(json_get(root, "input_file_id")), "file-", &b->input) &&
                fb_read_id(json_str(json_get(own, "output")), "file-", &b->out) &&
                fb_read_id(json_str(json_get(own, "errors")), "file-", &b->err);
    if (!good) {
        fb_batch_del(b);
        return false;
    }
    b->status = (enum fb_status)status;
    b->chat = str_is(json_str(json_get(root, "endpoint")), "/v1/chat/completions");
    memcpy(b->window, window.p, window.n);
    for (int i = 0; i < FB_STATUSES; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s_at", i == FB_VALIDATING ? "created" : fb_status_names[i]);
        b->at[i] = json_int(json_get(root, name), 0);
    }
    b->expires_at = json_int(json_get(root, "expires_at"), 0);
    b->model = fb_copy(json_str(json_get(root, "model")));
    b->metadata = fb_text(json_get(root, "metadata")), b->errors = fb_text(json_get(json_get(root, "errors"), "data"));
    b->has_out = json_is(json_get(root, "output_file_id"), JSON_STRING),
    b->has_err = json_is(json_get(root, "error_file_id"), JSON_STRING);
    b->total = json_int(json_get(counts, "total"), 0);
    b->completed = json_int(json_get(counts, "completed"), 0);
    b->failed = json_int(json_get(counts, "failed"), 0);
    fb_insert_batch(s, b);
    return true;
}

/* One entry of the folder. */
static void fb_load(fb_store *s, const char *name) {
    str stem = str_c(name), text;
    fb_id id;
    arena a = {0};
    toka_err e;
    char path[4096];
    if (str_ends(stem, STR(".part"))) unlinkat(s->dir, name, 0);
    if (!str_ends(stem, STR(".json"))) return;
    stem.n -= 5;
    bool file = fb_read_id(stem, "file-", &id);
    if (!file && !fb_read_id(stem, "batch_", &id)) return;
    snprintf(path, sizeof path, "%s/%s", s->path, name);
    if (os_map(path, &text, &e)) return;
    const json *root = json_parse(&a, text, json_trusted, &e);
    bool good = root && (file ? fb_load_file(s, &id, root) : fb_load_batch(s, &id, root));
    if (!good) fprintf(stderr, "toka serve: %s: not a record of ours, left alone\n", path);
    char us[17] = {0};
    memcpy(us, strpbrk(id.z, "-_") + 1, 16);
    s->last_us = MAX(s->last_us, (int64_t)(strtoull(us, NULL, 16) & INT64_MAX));
    arena_free(&a), os_unmap(text);
}

/* Contents that no record names: of a crash between two steps. Unfinished batches own theirs. */
static void fb_sweep(fb_store *s, const char *name) {
    fb_id id;
    if (!fb_read_id(str_c(name), "file-", &id) || fb_find_file(s, &id)) return;
    for (size_t i = 0; i < s->n_batches; i++) {
        const fb_batch *b = s->batches[i];
        if (!fb_has_ended(b) && (!strcmp(b->out.z, id.z) || !strcmp(b->err.z, id.z))) return;
    }
    unlinkat(s->dir, name, 0);
}

static int fb_each_entry(fb_store *s, void (*visit)(fb_store *, const char *), toka_err *e) {
    DIR *d = opendir(s->path);
    if (!d) return fail(e, TOKA_E_IO, "%s: %s", s->path, strerror(errno));
    for (const struct dirent *it; (it = readdir(d));) visit(s, it->d_name);
    closedir(d);
    return 0;
}

/* Makes the folder with what leads to it, for this user alone. */
static int fb_make_folder(char *path, toka_err *e) {
    for (char *p = path + 1;; p++) {
        if (*p && *p != '/') continue;
        char kept = *p;
        *p = 0;
        int bad = mkdir(path, 0700) && errno != EEXIST;
        if (bad) return fail(e, TOKA_E_IO, "%s: %s", path, strerror(errno));
        if (!(*p = kept)) return 0;
    }
}

static void *fb_work(void *user);

/* Locks the folder, reads what is there, and goes on with it. */
static int fb_take_folder(fb_store *s, toka_err *e) {
    int code = fb_make_folder(s->path, e);
    if (code) return code;
    s->dir = open(s->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->dir >= 0) s->locked = openat(s->dir, "lock", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (s->dir < 0 || s->locked < 0) return fail(e, TOKA_E_IO, "%s: %s", s->path, strerror(errno));
    for (int tries = 0; flock(s->locked, LOCK_EX | LOCK_NB); tries++) {
        if (errno != EWOULDBLOCK) return fail(e, TOKA_E_IO, "%s: %s", s->path, strerror(errno));
        if (tries == 30) return fail(e, TOKA_E_USE, "%s is in use by another server; give another --files-dir", s->path);
        usleep(100000); /* one that was killed a moment ago holds it until the system has taken it apart */
    }
    if ((code = fb_each_entry(s, fb_load, e)) || (code = fb_each_entry(s, fb_sweep, e))) return code;
    if (pthread_create(&s->worker, NULL, fb_work, s)) return fail(e, TOKA_E_IO, "cannot start a thread: %s", strerror(errno));
    s->started = true;
    return 0;
}

/* The same the first time it is needed. What went wrong then is what all hear from then on. With store.lock held. */
static int fb_attach(fb_store *s, toka_err *e) {
    if (!s->started && !s->why.code) fb_take_folder(s, &s->why);
    *e = s->why;
    return e->code;
}

static char *fb_default_folder(void) { /* NULL: the user has no home */
    const char *data = getenv("XDG_DATA_HOME"), *home = getenv("HOME");
    buf b = {0};
    if (data && *data == '/') buf_printf(&b, "%s/toka/files", data);
    else if (home && *home == '/') buf_printf(&b, "%s/.local/share/toka/files", home);
    return b.p;
}

/* Batches stop where they are. The engine must still be driven: requests under way are cancelled. */
static void fb_close(fb_store *s) {
    if (!s) return;
    pthread_mutex_lock(&s->lock);
    s->stopping = true;
    if (s->running) s->running->stop = 1;
    pthread_cond_broadcast(&s->wake);
    pthread_mutex_unlock(&s->lock);
    if (s->started) pthread_join(s->worker, NULL);
    for (size_t i = 0; i < s->n_files; i++) free(s->files[i].name);
    for (size_t i = 0; i < s->n_batches; i++) fb_batch_del(s->batches[i]);
    if (s->locked >= 0) close(s->locked);
    if (s->dir >= 0) close(s->dir);
    pthread_mutex_destroy(&s->lock), pthread_cond_destroy(&s->wake);
    free(s->files), free(s->batches), free(s->path), free(s);
}

/* A folder that was asked for must be usable. The default one is made when first needed. */
static int fb_open(fb_store **out, const fb_options *o, toka_err *e) {
    fb_store *s = mem_zalloc(sizeof *s);
    bool off = o->dir && !strcmp(o->dir, "off");
    int code = 0;
    s->o = *o, s->dir = s->locked = -1;
    pthread_mutex_init(&s->lock, NULL), pthread_cond_init(&s->wake, NULL);
    s->path = off ? NULL : o->dir ? mem_check(strdup(o->dir)) : fb_default_folder();
    const char *why = off ? "--files-dir off" : "no HOME, and no --files-dir";
    if (!s->path) fail(&s->why, TOKA_E_USE, "this server keeps no files: %s", why);
    pthread_mutex_lock(&s->lock);
    if (o->dir && !off) code = fb_attach(s, e);
    else if (s->path && os_is_dir(s->path) && fb_attach(s, e)) fprintf(stderr, "toka serve: %s\n", e->msg);
    pthread_mutex_unlock(&s->lock);
    *out = s;
    if (code) fb_close(s), *out = NULL;
    return code;
}

/* ---- A batch from beginning to end: the worker's thread ---- */

static void fb_put_error(buf *list, const char *code, int64_t line, const char *param, const char *message) {
    json_put_open(list, '{');
    json_put_key(list, "code"), json_put_str(list, str_c(code));
    json_put_key(list, "line");
    if (line) json_put_int(list, line);
    else json_put_null(list);
    json_put_key(list, "message"), json_put_str(list, str_c(message));
    json_put_key(list, "param");
    if (param) json_put_str(list, str_c(param));
    else json_put_null(list);
    json_put_close(list, '}');
}

/* What is wrong with a line as a member of a batch; its body is looked at when it runs. NULL: nothing. */
static const char *fb_line_error(const fb_batch *b, const json *root, const char **param, const char **message) {
    const json *id = json_get(root, "custom_id"), *method = json_get(root, "method");
    *param = "custom_id";
    if (!json_is(root, JSON_OBJECT)) return *param = NULL, *message = "expected a JSON object", "invalid_json_line";
    if (!json_is(id, JSON_STRING) || !id->n) return *message = "custom_id: expected a text", "missing_required_parameter";
    *param = "method";
    if (!str_is(json_str(method), "POST")) return *message = "method: expected POST", "invalid_method";
    *param = "url";
    if (!str_is(json_str(json_get(root, "url")), b->chat ? "/v1/chat/completions" : "/v1/completions"))
        return *message = "url: it is not the endpoint of the batch", "invalid_url";
    *param = "body";
    if (!json_is(json_get(root, "body"), JSON_OBJECT)) return *message = "body: expected an object", "missing_required_parameter";
    return NULL;
}

static void fb_validate_line(fb_batch *b, run_table *seen, const run_input *in, str line, buf *errors, int *n_errors) {
    arena a = {0};
    toka_err why = {0};
    const char *param = NULL, *message = why.msg, *code;
    if (in->too_long) fail(&why, TOKA_E_INPUT, "longer than %d bytes", RUN_LINE_BYTES);
    const json *root = why.code ? NULL : json_parse(&a, line, run_limits, &why);
    code = root ? fb_line_error(b, root, &param, &message) : "invalid_json_line";
    if (!code) {
        run_seen *place = run_table_at(seen, run_hash(json_str(json_get(root, "custom_id"))));
        if (place->state) {
            fail(&why, TOKA_E_USE, "the custom_id of line %lld again", (long long)place->state);
            code = "duplicate_custom_id", param = "custom_id", message = why.msg;
        }
        run_table_set(seen, place, place->state ? place->state : (uint64_t)in->number);
    }
    if (code && (*n_errors)++ < FB_MAX_ERRORS) fb_put_error(errors, code, in->number, param, message);
    arena_free(&a);
}

/* Reads the input once. Fills b->total, and the list of what is wrong. */
static void fb_validate(fb_store *s, fb_batch *b, buf *errors) {
    run_table seen = {0};
    run_input in;
    str line;
    toka_err e = {0};
    int n_errors = 0, got = 0;
    int64_t total = 0;
    int fd = openat(s->dir, b->input.z, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
        fb_put_error(errors, "file_not_found", 0, "input_file_id", "the input file is gone");
        return;
    }
    run_input_init(&in, fd, b->input.z, &b->stop);
    while (total <= FB_MAX_LINES && n_errors < FB_MAX_ERRORS && (got = run_next_line(&in, &line, NULL, &e)) > 0) {
        if (!in.too_long && run_is_blank(line)) continue;
        total++;
        fb_validate_line(b, &seen, &in, line, errors, &n_errors);
    }
    if (got < 0) fb_put_error(errors, "server_error", 0, NULL, e.msg);
    else if (!total && !b->stop) fb_put_error(errors, "empty_batch", 0, NULL, "the input file has no requests");
    if (total > FB_MAX_LINES) fb_put_error(errors, "too_many_tasks", 0, NULL, "the input file has too many requests");
    b->total = total;
    run_input_free(&in), free(seen.at);
    close(fd);
}

/* Runs what is not done yet. expired: every such line becomes an error. *all: nothing is left. */
static int fb_run_lines(fb_store *s, fb_batch *b, bool expired, bool *all, toka_err *e) {
    buf in = {0}, out = {0}, err = {0};
    buf_printf(&in, "%s/%s", s->path, b->input.z), buf_printf(&out, "%s/%s", s->path, b->out.z);
    buf_printf(&err, "%s/%s", s->path, b->err.z);
    run_options o = {.in = in.p, .out = out.p, .errors = err.p, .now = s->o.m->now, .base = s->o.m->base,
                     .model = s->o.m, .quiet = true,
                     .interrupted = &b->stop, .until = expired ? 0 : b->expires_at, .expired = expired,
                     .completed = &b->completed, .failed = &b->failed};
    o.base.priority = FB_PRIORITY;
    int code = run_served(s->o.t, &o, all, e);
    buf_free(&in), buf_free(&out), buf_free(&err);
    return code;
}

/* A file ends with its last whole line: it may be of a batch that was killed and then cancelled. */
static void fb_cut_torn(int fd) {
    char block[4096];
    off_t end = lseek(fd, 0, SEEK_END);
    while (end > 0) {
        off_t from = MAX((off_t)0, end - (off_t)sizeof block);
        ssize_t n = pread(fd, block, (size_t)(end - from), from);
        const char *feed = n == end - from ? memrchr(block, '\n', (size_t)n) : NULL;
        end = feed ? from + (feed - block) + 1 : from;
        if (feed || n < 0) break;
    }
    if (ftruncate(fd, end)) fprintf(stderr, "toka serve: a torn last line: %s\n", strerror(errno));
}

/* One of the two output files: a file from now on, if there is anything in it. With store.lock held. */
static bool fb_publish(fb_store *s, const fb_batch *b, const fb_id *id, const char *kind) {
    struct stat st;
    toka_err e;
    if (fb_find_file(s, id)) return true; /* published before a crash */
    int fd = openat(s->dir, id->z, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return false;
    fb_cut_torn(fd);
    bool any = !fsync(fd) && !fstat(fd, &st) && st.st_size;
    close(fd);
    if (!any) return unlinkat(s->dir, id->z, 0), false;
    buf name = {0};
    buf_printf(&name, "%s_%s.jsonl", b->id.z, kind);
    fb_file f = {*id, (int64_t)st.st_size, fb_now(), name.p, "batch_output"};
    if (fb_save_file(s, &f, &e)) fprintf(stderr, "toka serve: %s: %s\n", id->z, e.msg);
    fb_insert_file(s, f);
    return true;
}

/* To its end. With store.lock held. */
static void fb_finish(fb_store *s, fb_batch *b, enum fb_status end) {
    b->has_out = fb_publish(s, b, &b->out, "output"), b->has_err = fb_publish(s, b, &b->err, "error");
    fb_enter(s, b, end);
}

static void fb_fail(fb_store *s, fb_batch *b, str errors) { /* with store.lock held */
    buf list = {0};
    buf_char(&list, '['), buf_str(&list, errors), buf_char(&list, ']');
    free(b->errors), b->errors = list.p;
    fb_finish(s, b, FB_FAILED);
}

static void fb_step_validate(fb_store *s, fb_batch *b) {
    buf errors = {0};
    fb_validate(s, b, &errors);
    pthread_mutex_lock(&s->lock);
    if (errors.n && b->status == FB_VALIDATING) fb_fail(s, b, buf_view(&errors));
    else if (b->status == FB_VALIDATING && !b->stop) fb_enter(s, b, FB_IN_PROGRESS);
    pthread_mutex_unlock(&s->lock);
    buf_free(&errors);
}

/* A device that failed is not the batch's fault: it goes on with the next server. */
static void fb_step_run(fb_store *s, fb_batch *b) {
    toka_err e;
    bool all = false, expired = fb_now() >= b->expires_at;
    int code = fb_run_lines(s, b, expired, &all, &e);
    pthread_mutex_lock(&s->lock);
    if (code == TOKA_E_DEVICE) {
        s->stopping = true;
    } else if (b->status == FB_IN_PROGRESS && code && !b->stop) {
        buf error = {0};
        fb_put_error(&error, "server_error", 0, NULL, e.msg);
        fb_fail(s, b, buf_view(&error));
        buf_free(&error);
    } else if (b->status == FB_IN_PROGRESS && all) {
        if (expired) fb_finish(s, b, FB_EXPIRED);
        else fb_enter(s, b, FB_FINALIZING);
    }
    pthread_mutex_unlock(&s->lock);
}

/* The oldest batch that there is something to do for. With store.lock held. */
static fb_batch *fb_next(const fb_store *s) {
    for (size_t i = 0; i < s->n_batches; i++) {
        fb_batch *b = s->batches[i];
        bool ours = !strcmp(b->model, s->o.m->names[0]) || b->status == FB_CANCELLING || b->status == FB_FINALIZING;
        if (!fb_has_ended(b) && ours) return b;
    }
    return NULL;
}

static void *fb_work(void *user) {
    fb_store *s = user;
    pthread_mutex_lock(&s->lock);
    while (!s->stopping) {
        fb_batch *b = s->running = fb_next(s);
        if (!b) {
            pthread_cond_wait(&s->wake, &s->lock);
        } else if (b->status == FB_FINALIZING) {
            fb_finish(s, b, FB_COMPLETED);
        } else if (b->status == FB_CANCELLING) {
            fb_finish(s, b, FB_CANCELLED);
        } else {
            void (*step)(fb_store *, fb_batch *) = b->status == FB_VALIDATING ? fb_step_validate : fb_step_run;
            pthread_mutex_unlock(&s->lock);
            step(s, b);
            pthread_mutex_lock(&s->lock);
        }
    }
    s->running = NULL;
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ---- Answers ---- */

static void fb_error(http_reply *reply, int status, const char *param, const char *code, const char *message) {
    reply->status = status;
    buf_clear(&reply->body);
    api_error(&reply->body, status, message, NULL, param, code);
}

static void fb_not_found(http_reply *reply, const char *what, str id) {
    toka_err e;
    fail(&e, TOKA_E_USE, "no such %s: '%.*s'", what, STRF(id));
    fb_error(reply, 404, "id", NULL, e.msg);
}

static void fb_failed(http_reply *reply, const toka_err *e) { /* the folder's fault, not the client's */
    fb_error(reply, e->code == TOKA_E_USE ? 503 : 500, NULL, NULL, e->msg);
}

/* ?limit=, of which OpenAI's most is cut to ours. False: the reply says why. */
static bool fb_read_limit(const http_request *r, int most, int otherwise, size_t *limit, http_reply *reply) {
    buf text = {0};
    char *end = NULL;
    *limit = (size_t)otherwise;
    bool given = http_query(r, "limit", &text);
    long v = given && text.n ? strtol(text.p, &end, 10) : 0;
    bool good = !given || (end && !*end && isdigit((unsigned char)*text.p) && v >= 1);
    if (given && good) *limit = (size_t)MIN(v, (long)most);
    if (!good) fb_error(reply, 400, "limit", NULL, "limit: expected a number of at least 1");
    buf_free(&text);
    return good;
}

/* ?after=ID. False: the reply says why. *at: index of the entry behind which to go on, or n. */
static bool fb_read_after(const fb_store *s, const http_request *r, bool batches, size_t *at, http_reply *reply) {
    buf text = {0};
    fb_id id;
    bool given = http_query(r, "after", &text), good = true;
    *at = batches ? s->n_batches : s->n_files;
    if (given && (good = fb_read_id(buf_view(&text), batches ? "batch_" : "file-", &id))) {
        *at = batches ? fb_batch_at(s, &id) : fb_file_at(s, &id);
        good = batches ? fb_find_batch(s, &id) != NULL : fb_find_file(s, &id) != NULL;
    }
    if (!good) fb_error(reply, 400, "after", NULL, "after: expected the id of an entry of this list");
    buf_free(&text);
    return good;
}

static void fb_end_list(buf *b, const char *first, const char *last, bool more) {
    json_put_close(b, ']');
    json_put_key(b, "first_id");
    if (first) json_put_str(b, str_c(first));
    else json_put_null(b);
    json_put_key(b, "last_id");
    if (last) json_put_str(b, str_c(last));
    else json_put_null(b);
    json_put_key(b, "has_more"), json_put_bool(b, more);
    json_put_close(b, '}');
}

/* GET /v1/files: newest first unless order=asc. */
static void fb_list_files(const fb_store *s, const http_request *r, http_reply *reply) {
    buf purpose = {0}, order = {0};
    size_t limit, at, n = 0;
    const char *first = NULL, *last = NULL;
    bool more = false, by_purpose = http_query(r, "purpose", &purpose), ordered = http_query(r, "order", &order);
    bool asc = ordered && str_is(buf_view(&order), "asc"), good = !ordered || asc || str_is(buf_view(&order), "desc");
    if (!good) fb_error(reply, 400, "order", NULL, "order: expected asc or desc");
    if (good && fb_read_after(s, r, false, &at, reply) && fb_read_limit(r, 10000, 10000, &limit, reply)) {
        buf_c(&reply->body, "{\"object\":\"list\",\"data\":[");
        size_t left = asc ? s->n_files - (at == s->n_files ? 0 : at + 1) : at;
        for (size_t k = 0; k < left && !more; k++) {
            const fb_file *f = &s->files[asc ? s->n_files - left + k : left - 1 - k];
            if (by_purpose && !str_is(buf_view(&purpose), f->purpose)) continue;
            if ((more = n == limit)) break;
            fb_put_file(f, &reply->body);
            first = n++ ? first : f->id.z, last = f->id.z;
        }
        fb_end_list(&reply->body, first, last, more);
    }
    buf_free(&purpose), buf_free(&order);
}

/* GET /v1/batches: newest first. */
static void fb_list_batches(const fb_store *s, const http_request *r, http_reply *reply) {
    size_t limit, at, n = 0;
    if (!fb_read_after(s, r, true, &at, reply) || !fb_read_limit(r, 100, 20, &limit, reply)) return;
    const char *first = at ? s->batches[at - 1]->id.z : NULL, *last = NULL;
    buf_c(&reply->body, "{\"object\":\"list\",\"data\":[");
    for (; n < limit && at; n++) {
        fb_put_batch(s->batches[--at], &reply->body), json_put_close(&reply->body, '}');
        last = s->batches[at]->id.z;
    }
    fb_end_list(&reply->body, first, last, at > 0);
}

/* GET /v1/files/{id}/content: the server sends the file itself. */
static void fb_content(const fb_store *s, const fb_file *f, http_reply *reply) {
    int fd = openat(s->dir, f->id.z, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
        toka_err e;
        fail(&e, TOKA_E_IO, "%s: %s", f->id.z, strerror(errno));
        fb_failed(reply, &e);
        return;
    }
    reply->type = "application/octet-stream";
    reply->fd = fd, reply->fd_bytes = f->bytes;
    buf_c(&reply->headers, "Content-Disposition: attachment; filename=\"");
    for (const char *c = f->name; *c; c++) buf_char(&reply->headers, isalnum((unsigned char)*c) || strchr(".-_", *c) ? *c : '_');
    buf_c(&reply->headers, "\"\r\nX-Content-Type-Options: nosniff\r\n");
}

static void fb_delete(fb_store *s, fb_file *f, http_reply *reply) {
    char record[64];
    fb_id id = f->id;
    for (size_t i = 0; i < s->n_batches; i++) {
        const fb_batch *b = s->batches[i];
        bool uses = !strcmp(b->input.z, id.z) || !strcmp(b->out.z, id.z) || !strcmp(b->err.z, id.z);
        if (!fb_has_ended(b) && uses) {
            toka_err e;
            fail(&e, TOKA_E_USE, "%s belongs to %s, which has not ended", id.z, b->id.z);
            fb_error(reply, 409, "id", NULL, e.msg);
            return;
        }
    }
    snprintf(record, sizeof record, "%s.json", id.z);
    if (unlinkat(s->dir, record, 0) || fsync(s->dir)) { /* the record first: contents alone are swept at the next start */
        toka_err e;
        fail(&e, TOKA_E_IO, "%s: %s", s->path, strerror(errno));
        fb_failed(reply, &e);
        return;
    }
    unlinkat(s->dir, id.z, 0);
    free(f->name);
    memmove(f, f + 1, (size_t)(s->files + s->n_files-- - (f + 1)) * sizeof *f);
    buf_printf(&reply->body, "{\"id\":\"%s\",\"object\":\"file\",\"deleted\":true}", id.z);
}

/* "24h": seconds, or -1. */
static int64_t fb_read_window(str s) {
    static const char units[] = "smhd";
    static const int64_t seconds[] = {1, 60, 3600, 86400};
    int64_t v = 0;
    for (size_t i = 0; i + 1 < s.n && s.n < 9; i++) {
        if (!isdigit((unsigned char)s.p[i])) return -1;
        v = v * 10 + s.p[i] - '0';
    }
    const char *unit = s.n >= 2 && s.n < 9 && s.p[s.n - 1] ? strchr(units, s.p[s.n - 1]) : NULL;
    v = unit ? v * seconds[unit - units] : 0;
    return v >= 1 && v <= FB_MAX_DAYS * 86400 ? v : -1;
}

/* At most 16 texts of 512 characters under names of 64, as OpenAI takes them. */
static bool fb_check_metadata(const json *v) {
    if (!v || v->type == JSON_NULL) return true;
    if (v->type != JSON_OBJECT || v->n > 16) return false;
    JSON_MEMBERS(key, v) if (key->n > 64 || key[1].type != JSON_STRING || key[1].n > 4 * 512) return false;
    return true;
}

/* The fields of a new batch. NULL: good; else which one is wrong, and *message. */
static const char *fb_read_batch(const fb_store *s, const json *root, fb_batch *b, const char **message) {
    str endpoint = json_str(json_get(root, "endpoint")), window = json_str(json_get(root, "completion_window"));
    const json *expires = json_get(root, "output_expires_after");
    if (!json_is(root, JSON_OBJECT)) return *message = "expected a JSON object", "";
    b->chat = str_is(endpoint, "/v1/chat/completions");
    if (!b->chat && !str_is(endpoint, "/v1/completions"))
        return *message = "endpoint: expected /v1/completions or /v1/chat/completions", "endpoint";
    int64_t seconds = fb_read_window(window);
    if (seconds < 0) return *message = "completion_window: expected a time up to 30 days, as 24h", "completion_window";
    if (!fb_check_metadata(json_get(root, "metadata")))
        return *message = "metadata: expected at most 16 texts of 512 characters under names of 64", "metadata";
    if (expires && expires->type != JSON_NULL) return *message = "output_expires_after is not supported", "output_expires_after";
    bool named = fb_read_id(json_str(json_get(root, "input_file_id")), "file-", &b->input);
    const fb_file *input = named ? fb_find_file(s, &b->input) : NULL;
    if (!input) return *message = "input_file_id: no such file", "input_file_id";
    if (strcmp(input->purpose, "batch")) return *message = "input_file_id: the file's purpose is not batch", "input_file_id";
    memcpy(b->window, window.p, window.n);
    b->at[FB_VALIDATING] = fb_now(), b->expires_at = b->at[FB_VALIDATING] + seconds;
    return NULL;
}

static void fb_create(fb_store *s, str body, http_reply *reply) {
    arena a = {0};
    toka_err e;
    const char *message, *wrong = "";
    fb_batch *b = mem_zalloc(sizeof *b);
    const json *root = json_parse(&a, body, fb_limits, &e);
    if (!root) message = e.msg;
    else if (s->n_batches >= FB_MAX_BATCHES) message = "there are too many batches; remove records of old ones from the folder";
    else wrong = fb_read_batch(s, root, b, &message);
    if (!wrong) {
        b->id = fb_new_id(s, "batch_"), b->out = fb_new_id(s, "file-"), b->err = fb_new_id(s, "file-");
        b->model = mem_check(strdup(s->o.m->names[0])), b->metadata = fb_text(json_get(root, "metadata"));
        if (!fb_save_batch(s, b, &e)) {
            fb_insert_batch(s, b);
            fb_put_batch(b, &reply->body), json_put_close(&reply->body, '}');
            b = NULL; /* the table's */
            pthread_cond_broadcast(&s->wake);
        } else {
            fb_failed(reply, &e);
        }
    } else {
        fb_error(reply, 400, *wrong ? wrong : NULL, NULL, message);
    }
    if (b) fb_batch_del(b);
    arena_free(&a);
}

static void fb_cancel(fb_store *s, fb_batch *b, http_reply *reply) {
    if (b->status != FB_VALIDATING && b->status != FB_IN_PROGRESS && b->status != FB_CANCELLING) {
        toka_err e;
        fail(&e, TOKA_E_USE, "a batch that is %s cannot be cancelled", fb_status_names[b->status]);
        fb_error(reply, 409, "id", NULL, e.msg);
        return;
    }
    fb_enter(s, b, FB_CANCELLING);
    b->stop = 1;
    if (b != s->running) fb_finish(s, b, FB_CANCELLED);
    fb_put_batch(b, &reply->body), json_put_close(&reply->body, '}');
}

/* ---- Uploads ---- */

typedef struct fb_upload { /* POST /v1/files under way */
    fb_store *store;
    fb_form form;
    fb_id id;
    int fd;
    int64_t bytes;
    buf name, purpose;
    bool in_file, in_purpose, has_file, whole;
} fb_upload;

static void fb_upload_close(fb_upload *u, bool whole, http_reply *reply);

/* NULL: refused, the reply says why. */
static fb_upload *fb_upload_open(fb_store *s, str content_type, http_reply *reply) {
    toka_err e;
    fb_upload *u = mem_zalloc(sizeof *u);
    u->store = s, u->fd = -1;
    bool form = fb_form_init(&u->form, content_type);
    pthread_mutex_lock(&s->lock);
    int code = form ? fb_attach(s, &e) : 0;
    bool full = s->n_files >= FB_MAX_FILES;
    u->id = fb_new_id(s, "file-");
    pthread_mutex_unlock(&s->lock);
    char part[64];
    snprintf(part, sizeof part, "%s.part", u->id.z);
    if (form && !code && !full) {
        u->fd = openat(s->dir, part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (u->fd >= 0) return u;
        code = fail(&e, TOKA_E_IO, "%s: %s", s->path, strerror(errno));
    }
    fb_upload_close(u, false, reply);
    if (!form) fb_error(reply, 400, NULL, NULL, "Content-Type: expected multipart/form-data with a boundary");
    else if (code) fb_failed(reply, &e);
    else fb_error(reply, 400, NULL, NULL, "there are too many files; delete some");
    return NULL;
}

static bool fb_upload_write(fb_upload *u, str data, http_reply *reply) {
    u->bytes += (int64_t)data.n;
    if (u->bytes > FB_FILE_BYTES) return fb_error(reply, 413, "file", NULL, "file: longer than 4 GiB"), false;
    while (data.n) {
        ssize_t n = write(u->fd, data.p, data.n);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            toka_err e;
            fail(&e, TOKA_E_IO, "%s: %s", u->store->path, strerror(errno));
            return fb_failed(reply, &e), false;
        }
        data = str_sub(data, (size_t)n, data.n);
    }
    return true;
}

/* A new part: which field it is. */
static bool fb_upload_part(fb_upload *u, http_reply *reply) {
    str name = buf_view(&u->form.name);
    u->in_file = str_is(name, "file"), u->in_purpose = str_is(name, "purpose");
    const char *wrong = str_starts(name, STR("expires_after")) ? "expires_after" : u->in_file && u->has_file ? "file" : NULL;
    if (wrong)
        return fb_error(reply, 400, wrong, NULL, u->in_file ? "file: given twice" : "expires_after is not supported"), false;
    if (u->in_file) {
        str path = buf_view(&u->form.filename);
        while (memchr(path.p, '/', path.n)) path = str_sub(path, 1, path.n);
        u->has_file = true;
        buf_put(&u->name, path.p, MIN(path.n, (size_t)FB_NAME_BYTES));
        if (!u->name.n || memchr(u->name.p, 0, u->name.n)) buf_clear(&u->name), buf_c(&u->name, "file");
    }
    return true;
}

/* Any bytes of the body, in order. False: refused, the reply says why. */
static bool fb_upload_put(fb_upload *u, str piece, http_reply *reply) {
    for (size_t used; piece.n; piece = str_sub(piece, used, piece.n)) {
        str data;
        enum fb_form_event event = fb_form_take(&u->form, piece, &used, &data);
        if (event == FB_FORM_BAD) return fb_error(reply, 400, NULL, NULL, "the body is not a multipart form"), false;
        if (event == FB_FORM_PART && !fb_upload_part(u, reply)) return false;
        if (event == FB_FORM_DATA && u->in_file && !fb_upload_write(u, data, reply)) return false;
        if (event == FB_FORM_DATA && u->in_purpose) buf_put(&u->purpose, data.p, MIN(data.n, (size_t)64));
        if (event == FB_FORM_PART_END) u->in_file = u->in_purpose = false;
        if (event == FB_FORM_END) u->whole = true;
    }
    return true;
}

/* The contents under their name, then the record: from there on it is a file. With store.lock held. */
static void fb_upload_keep(fb_upload *u, const char *purpose, http_reply *reply) {
    fb_store *s = u->store;
    char part[64];
    toka_err e;
    fb_file f = {u->id, u->bytes, fb_now(), u->name.p, purpose};
    snprintf(part, sizeof part, "%s.part", u->id.z);
    int code = 0;
    if (fsync(u->fd) || renameat(s->dir, part, s->dir, u->id.z)) code = fail(&e, TOKA_E_IO, "%s: %s", s->path, strerror(errno));
    if (!code) code = fb_save_file(s, &f, &e);
    if (code) {
        unlinkat(s->dir, u->id.z, 0);
        fb_failed(reply, &e);
        return;
    }
    u->name.p = NULL; /* the table's */
    fb_insert_file(s, f);
    fb_put_file(&f, &reply->body);
}

/* whole: the body has ended, the reply gets the answer. Else it was refused or the client is gone: nothing is kept. Frees u. */
static void fb_upload_close(fb_upload *u, bool whole, http_reply *reply) {
    fb_store *s = u->store;
    char part[64];
    const char *purpose = fb_purpose(buf_view(&u->purpose));
    snprintf(part, sizeof part, "%s.part", u->id.z);
    if (whole) {
        reply->status = 200;
        bool ours = purpose && !strcmp(purpose, "batch_output"); /* to make */
        fsync(u->fd); /* what takes long is done before others have to wait; fb_upload_keep asks again and looks at the answer */
        pthread_mutex_lock(&s->lock);
        if (!u->whole) fb_error(reply, 400, NULL, NULL, "the body ends before its form does");
        else if (!u->has_file) fb_error(reply, 400, "file", NULL, "file: missing");
        else if (!u->bytes) fb_error(reply, 400, "file", NULL, "file: it is empty");
        else if (!purpose || ours) fb_error(reply, 400, "purpose", NULL, "purpose: missing or unknown");
        else fb_upload_keep(u, purpose, reply);
        pthread_mutex_unlock(&s->lock);
    }
    if (u->fd >= 0) unlinkat(s->dir, part, 0), close(u->fd); /* gone already if it was kept */
    fb_form_free(&u->form), buf_free(&u->name), buf_free(&u->purpose);
    free(u);
}

/* ---- Routes ---- */

static void fb_method(http_reply *reply, const char *allowed) {
    buf_printf(&reply->headers, "Allow: %s\r\n", allowed);
    fb_error(reply, 405, NULL, NULL, "this method is not for this path");
}

/* /v1/files/{id} and /v1/files/{id}/content. With store.lock held. */
static void fb_route_file(fb_store *s, const http_request *r, str id_text, str verb, http_reply *reply) {
    bool get = r->method == HTTP_GET || r->method == HTTP_HEAD;
    fb_id id;
    fb_file *f = fb_read_id(id_text, "file-", &id) ? fb_find_file(s, &id) : NULL;
    if (!f || (verb.n && !str_is(verb, "/content"))) fb_not_found(reply, "file", id_text);
    else if (verb.n && get) fb_content(s, f, reply);
    else if (verb.n) fb_method(reply, "GET, HEAD");
    else if (get) fb_put_file(f, &reply->body);
    else if (r->method == HTTP_DELETE) fb_delete(s, f, reply);
    else fb_method(reply, "GET, HEAD, DELETE");
}

static void fb_route_batch(fb_store *s, const http_request *r, str id_text, str verb, http_reply *reply) {
    bool get = r->method == HTTP_GET || r->method == HTTP_HEAD;
    fb_id id;
    fb_batch *b = fb_read_id(id_text, "batch_", &id) ? fb_find_batch(s, &id) : NULL;
    if (!b || (verb.n && !str_is(verb, "/cancel"))) fb_not_found(reply, "batch", id_text);
    else if (verb.n && r->method == HTTP_POST) fb_cancel(s, b, reply);
    else if (verb.n) fb_method(reply, "POST");
    else if (get) fb_put_batch(b, &reply->body), json_put_close(&reply->body, '}');
    else fb_method(reply, "GET, HEAD");
}

/* A whole upload at once. */
static void fb_take_upload(fb_store *s, const http_request *r, str body, http_reply *reply) {
    str type = http_find(r, "content-type");
    fb_upload *u = fb_upload_open(s, type.p ? type : STR(""), reply);
    if (u) fb_upload_close(u, fb_upload_put(u, body, reply), reply);
}

/* Every path under /v1/files and /v1/batches. May wait for the disk. Thread: any. */
static void fb_handle(fb_store *s, const http_request *r, str body, http_reply *reply) {
    const str files_path = STR("/v1/files"), batches_path = STR("/v1/batches");
    bool files = str_starts(r->path, files_path), get = r->method == HTTP_GET || r->method == HTTP_HEAD;
    str rest = str_sub(r->path, files ? files_path.n : MIN(batches_path.n, r->path.n), r->path.n), id = {0}, verb = {0};
    reply->status = 200;
    if (rest.n && rest.p[0] == '/') {
        const char *slash = memchr(rest.p + 1, '/', rest.n - 1);
        size_t end = slash ? (size_t)(slash - rest.p) : rest.n;
        id = str_sub(rest, 1, end), verb = str_sub(rest, end, rest.n);
    }
    if (files && !rest.n && r->method == HTTP_POST) {
        fb_take_upload(s, r, body, reply);
        return;
    }
    toka_err e;
    pthread_mutex_lock(&s->lock);
    if (s->why.code) fb_failed(reply, &s->why);
    else if (body.n > FB_BODY_BYTES) fb_error(reply, 413, NULL, NULL, "the body is longer than 1 MiB");
    else if (rest.n && files) fb_route_file(s, r, id, verb, reply);
    else if (rest.n) fb_route_batch(s, r, id, verb, reply);
    else if (get) (files ? fb_list_files : fb_list_batches)(s, r, reply);
    else if (files || r->method != HTTP_POST) fb_method(reply, "GET, HEAD, POST");
    else if (fb_attach(s, &e)) fb_failed(reply, &e);
    else fb_create(s, body, reply);
    pthread_mutex_unlock(&s->lock);
}

/* For people: where files are kept, or why they are not. */
static const char *fb_folder(const fb_store *s) { return s->why.code ? s->why.msg : s->path; }

/* ===========================================================================
 * MARK: 24. Status page [pure]
 * What GET / answers: one page without an outside asset, which asks /metrics every second, /v1/batches every third, and streams
 * /v1/completions into its box. Everything a server says goes in as text, never as markup. A key is kept for the tab's life only.
 * =========================================================================== */

static const char srv_page[] =
    "<!doctype html>\n"
    "<html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>toka</title>\n"
    "<link rel='icon' href='data:,'>\n"
    "<style>\n"
    ":root { color-scheme: light dark; --line: #8886; --soft: #8882; --out: #2563eb; --in: #d97706 }\n"
    "@media (prefers-color-scheme: dark) { :root { --out: #7aa7ff; --in: #fbbf24 } }\n"
    "body { font: 15px/1.45 system-ui, sans-serif; max-width: 56rem; margin: 1.5rem auto; padding: 0 1rem }\n"
    "h1 { font-size: 1.25rem; margin: 0 0 1rem }\n"
    "h2 { font-size: 1rem; margin: 1.75rem 0 .5rem }\n"
    "small, th { opacity: .7; font-weight: 400 }\n"
    "#tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .5rem }\n"
    "#tiles div { background: var(--soft); border-radius: .5rem; padding: .5rem .75rem }\n"
    "#tiles b { display: block; font-size: 1.4rem }\n"
    "svg { width: 100%; height: 10rem; display: block; margin-top: .75rem; background: var(--soft); border-radius: .5rem }\n"
    "polyline { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke }\n"
    "#out { stroke: var(--out) } #in { stroke: var(--in) }\n"
    "table { border-collapse: collapse; width: 100% }\n"
    "th, td { text-align: left; padding: .2rem .75rem .2rem 0; border-bottom: 1px solid var(--line) }\n"
    "textarea, input { font: inherit; box-sizing: border-box } textarea { width: 100%; height: 6rem } input { width: 6rem }\n"
    "button { font: inherit; padding: .2rem 1rem }\n"
    "form p { display: flex; gap: 1rem; flex-wrap: wrap; align-items: center; margin: .5rem 0 }\n"
    "pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); border-radius: .5rem }\n"
    "pre { padding: .75rem; min-height: 3rem }\n"
    "</style>\n"
    "<h1>toka <small id='model'></small> <small id='state' role='status'>connecting</small></h1>\n"
    "<div id='tiles'></div>\n"
    "<svg viewBox='0 0 120 100' preserveAspectRatio='none' role='img' aria-label='tokens a second over two minutes'>\n"
    "<polyline id='in' /><polyline id='out' /></svg>\n"
    "<small><span style='color:var(--out)'>&#9632;</span> output and\n"
    "<span style='color:var(--in)'>&#9632;</span> prompt tokens a second, last two minutes;\n"
    "top of the plot: <span id='top'>0</span></small>\n"
    "<section id='batches' hidden><h2>Batches</h2>\n"
    "<table><thead><tr><th>id<th>status<th>done<th>failed<th>of<tbody></table></section>\n"
    "<h2>Try it</h2>\n"
    "<form>\n"
    "<textarea name='prompt' aria-label='prompt' required>\n"
    "Tom has 3 boxes with 4 apples each. How many apples does he have?</textarea>\n"
    "<p><label>tokens <input name='max_tokens' type='number' min='1' value='128'></label>\n"
    "<label>temperature <input name='temperature' type='number' min='0' step='any' value='0'></label>\n"
    "<label id='keys' hidden>API key <input name='key' type='password' autocomplete='off'></label>\n"
    "<button>Run</button> <small id='usage'></small></p></form>\n"
    "<pre id='answer' aria-live='polite'></pre>\n"
    "<script>\n"
    "'use strict';\n"
    "const $ = id => document.getElementById(id), form = document.forms[0], seen = [], SECONDS = 120;\n"
    "const tiles = ['running', 'waiting', 'output tok/s', 'prompt tok/s', 'KV cache used', 'prefix hits'].map(name => {\n"
    "  const div = $('tiles').appendChild(document.createElement('div')), value = div.appendChild(document.createElement('b'));\n"
    "  value.textContent = '-';\n"
    "  div.append(name);\n"
    "  return value;\n"
    "});\n"
    "let model = '', stop = null, polls = 0;\n"
    "form.key.value = sessionStorage.getItem('key') || '';\n"
    "form.key.onchange = () => sessionStorage.setItem('key', form.key.value);\n"
    "\n"
    "const call = async (path, more = {}) => {\n"
    "  const headers = { 'Content-Type': 'application/json' };\n"
    "  if (form.key.value) headers.Authorization = 'Bearer ' + form.key.value;\n"
    "  const answer = await fetch(path, { ...more, headers });\n"
    "  if (answer.status == 401) $('keys').hidden = false;\n"
    "  if (!answer.ok) throw Error((await answer.json().catch(() => ({}))).error?.message || 'HTTP status ' + answer.status);\n"
    "  return answer;\n"
    "};\n"
    "\n"
    "const read = text => { // Prometheus text: sums over label sets\n"
    "  const sum = {};\n"
    "  for (const [, name, value] of text.matchAll(/^toka:(\\w+)(?:\\{.*\\})? (\\S+)$/gm))\n"
    "    sum[name] = (sum[name] || 0) + Number(value);\n"
    "  return { ...sum, at: performance.now() / 1e3 };\n"
    "};\n"
    "\n"
    "const draw = () => {\n"
    "  const rates = name => seen.slice(1).map((m, i) => Math.max(0, m[name] - seen[i][name]) / (m.at - seen[i].at));\n"
    "  const out = rates('generation_tokens_total'), into = rates('prompt_tokens_total'), top = Math.max(1, ...out, ...into);\n"
    "  const points = list => list.map((v, i) => `${SECONDS - list.length + i + 1},${98 - 94 * v / top}`).join(' ');\n"
    "  const last = seen.at(-1), first = seen[0], share = x => (100 * x).toFixed(1) + ' %';\n"
    "  const hits = last.prefix_cache_hits_total - first.prefix_cache_hits_total;\n"
    "  const asked = last.prefix_cache_queries_total - first.prefix_cache_queries_total;\n"
    "  $('out').setAttribute('points', points(out)), $('in').setAttribute('points', points(into));\n"
    "  $('top').textContent = Math.round(top).toLocaleString();\n"
    "  [last.num_requests_running, last.num_requests_waiting, Math.round(out.at(-1) || 0).toLocaleString(),\n"
    "   Math.round(into.at(-1) || 0).toLocaleString(), share(last.kv_cache_usage_perc), asked ? share(hits / asked) : '-']\n"
    "    .forEach((v, i) => tiles[i].textContent = v);\n"
    "};\n"
    "\n"
    "const showBatches = list => {\n"
    "  $('batches').hidden = !list.length;\n"
    "  $('batches').querySelector('tbody').replaceChildren(...list.map(b => {\n"
    "    const row = document.createElement('tr'), n = b.request_counts;\n"
    "    for (const v of [b.id.slice(0, 22), b.status.replace('_', ' '), n.completed, n.failed, n.total])\n"
    "      row.insertCell().textContent = v;\n"
    "    return row;\n"
    "  }));\n"
    "};\n"
    "\n"
    "const poll = async () => {\n"
    "  try {\n"
    "    if (!model) $('model').textContent = model = (await (await call('v1/models')).json()).data[0].id;\n"
    "    seen.push(read(await (await call('metrics')).text()));\n"
    "    if (seen.length > SECONDS + 1) seen.shift();\n"
    "    draw();\n"
    "    $('state').textContent = 'ready';\n"
    "    if (polls++ % 3 == 0) call('v1/batches?limit=5').then(a => a.json()).then(a => showBatches(a.data)).catch(() => {});\n"
    "  } catch (e) {\n"
    "    $('state').textContent = e.message;\n"
    "  }\n"
    "  setTimeout(poll, 1000);\n"
    "};\n"
    "poll();\n"
    "\n"
    "const stream = async (body, signal) => {\n"
    "  const answer = await call('v1/completions', { method: 'POST', body: JSON.stringify(body), signal });\n"
    "  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();\n"
    "  for (let text = ''; ;) {\n"
    "    const { value, done } = await reader.read();\n"
    "    if (done) return;\n"
    "    const lines = (text + value).split('\\n');\n"
    "    text = lines.pop();\n"
    "    for (const line of lines) {\n"
    "      if (!line.startsWith('data: ') || line == 'data: [DONE]') continue;\n"
    "      const event = JSON.parse(line.slice(6));\n"
    "      if (event.error) throw Error(event.error.message);\n"
    "      $('answer').textContent += event.choices[0]?.text || '';\n"
    "      if (event.usage) $('usage').textContent = `${event.usage.prompt_tokens} + ${event.usage.completion_tokens} tokens`;\n"
    "    }\n"
    "  }\n"
    "};\n"
    "\n"
    "form.onsubmit = async e => {\n"
    "  e.preventDefault();\n"
    "  if (stop) return stop.abort();\n"
    "  const began = performance.now(), button = form.querySelector('button');\n"
    "  stop = new AbortController(), button.textContent = 'Stop', $('answer').textContent = $('usage').textContent = '';\n"
    "  try {\n"
    "    await stream({ model, prompt: form.prompt.value, max_tokens: +form.max_tokens.value,\n"
    "                   temperature: +form.temperature.value, stream: true,\n"
    "                   stream_options: { include_usage: true } }, stop.signal);\n"
    "    $('usage').textContent += `, ${((performance.now() - began) / 1e3).toFixed(2)} s`;\n"
    "  } catch (e) {\n"
    "    if (e.name != 'AbortError') $('usage').textContent = e.message;\n"
    "  }\n"
    "  stop = null, button.textContent = 'Run';\n"
    "};\n"
    "</script>\n"
    "</html>\n";

/* ===========================================================================
 * MARK: 25. Server: requests and metrics [os]
 * What a request is between its last byte in and its first byte out: routes, keys, the calls that workers carry to the engine
 * and back, and the numbers of /metrics. Chapter 26 has the sockets.
 *
 *     loop (26) --srv_dispatch--> ready list --> worker: srv_begin: api_parse, toka_submit, or another handler
 *                                                engine: srv_on_event: api_pack, nothing else --> ready list
 *     loop (26) <--dirty list <----------------- worker: srv_continue: api_feed, api_finish
 *
 * The loop never parses JSON, waits or touches a disk; the engine's thread never makes text. A call is with at most one worker at
 * a time. Between the threads there is one lock, held for a few pointers at a time.
 *
 * What always holds:
 *   - srv.lock guards the lists, the metrics and the fields of a call marked (lock); a call is freed when its last reference
 *     goes: its connection, a place in the ready or dirty list (or with a worker), each engine request before its last event;
 *   - a call whose client is gone has all its engine requests cancelled, also those submitted later;
 *   - a slow reader stops the making of its text (`stalled`), not the engine: what waits is packed records, at most
 *     SRV_MAX_RECORDS; a reader that takes no byte for --write-timeout is dropped.
 * =========================================================================== */

enum {
    SRV_MAX_UNSENT = 256 << 10,       /* bytes of a stream made and not sent before its making waits */
    SRV_MAX_RECORDS = 64 << 20,       /* bytes of records waiting for a slow reader; one more and it is dropped */
    SRV_FEW_RECORDS = 64 << 10,       /* bytes of records of an answer in one piece before a worker collects them */
    SRV_SIMPLE_BYTES = 1 << 20,       /* body of requests that are not prompts or files */
    SRV_PIECE_BYTES = 1 << 20,        /* of an upload, handed to a worker */
    SRV_BODIES = 16,                  /* all bodies together may hold so often --max-body-bytes */
    SRV_MAX_CHOICES = 1 << 16,        /* of a request */
    SRV_PACE_S = 10,
    SRV_MAX_RETRY_S = 60,
    SRV_MAX_UNKNOWN = 64,             /* names of unknown fields that are reported */
};

typedef struct srv_options { /* what toka serve was asked to do; strings are the caller's */
    toka_options open;
    const char *host, *uds; /* uds not NULL: a unix socket there instead */
    int port;               /* 0: any free one, told on standard error */
    const char *const *keys; /* [n_keys] API keys; none: everybody may */
    int n_keys;
    const char *const *names; /* [n_names] served names; none: the model's */
    int n_names;
    const char *origins;    /* comma-separated list of origins that browsers may come from, or "*"; NULL: none */
    const char *files_dir, *now;
    int max_queue;          /* requests that wait for their first token; more get a 429 */
    int64_t max_body_bytes; /* of a prompt's request */
    int64_t max_upload_bytes;
    double read_timeout, write_timeout, keep_alive; /* seconds */
    double step_timeout;    /* requests under way and no step for so many seconds: /health says so */
    int n_workers;
    bool model_defaults, strict, quiet; /* model_defaults: sampling as generation_config.json says */
    atomic_int *interrupted; /* 1: drain and return, 2: return at once */
} srv_options;

enum { SRV_BUCKETS = 22 };

typedef struct srv_hist { /* Prometheus histogram */
    const double *le;     /* [SRV_BUCKETS] upper bounds */
    int64_t counts[SRV_BUCKETS + 1], n;
    double sum;
} srv_hist;

typedef struct srv_metrics {
    srv_hist ttft, itl, tpot, e2e, prompt_tokens, output_tokens, params_n;
    double finished[5];    /* samples, by toka_finish */
    double statuses[6];    /* answers, by hundreds */
    int64_t rejected;      /* with 429 */
    int64_t first_tokens;  /* requests that got one */
} srv_metrics;

typedef struct srv_pace { /* how fast the queue moves, over the last SRV_PACE_S seconds or twice that */
    double t[2];    /* looks at it: since the queue was last empty, and some time apart; 0: none yet */
    int64_t left[2]; /* calls that had left it by then, with a first token or without */
} srv_pace;

enum srv_phase { SRV_LOADING, SRV_READY, SRV_FAILED }; /* of the engine */

typedef struct srv {
    const srv_options *o;
    toka *t;              /* from SRV_READY on */
    toka_info info;
    api_model model;
    fb_store *files;
    const char *name;     /* served */
    char fingerprint[32];
    atomic_int phase;     /* enum srv_phase */
    atomic_bool draining, wedged;
    uint64_t random[2];   /* of this process: ids and seeds */
    atomic_ullong n_serial;
    int64_t started;      /* unix seconds */
    atomic_llong body_bytes; /* of bodies held */

    pthread_mutex_t lock;
    pthread_cond_t work;
    struct srv_call *ready, **ready_end, *dirty;
    int n_idle;           /* workers that wait */
    bool stopping;        /* workers end */
    bool woken;           /* the loop knows that there is something in dirty */
    int n_waiting;        /* calls without a first token */
    int64_t n_left;       /* calls that were among them */
    srv_pace pace;
    srv_metrics m;
    buf unknown;          /* names of unknown fields reported, each with a line feed behind it */
    int n_unknown;
    toka_err e;           /* why the phase is SRV_FAILED */

    struct srv_loop *loop; /* chapter 26 */
    int wake_fd;          /* eventfd that wakes the loop */
} srv;

typedef struct srv_part { /* one engine request of a call: the `user` of its events */
    struct srv_call *call;
    api_part *part;
    int n_left;  /* samples that have not ended; the engine's thread */
} srv_part;

enum srv_stage { SRV_NEW, SRV_RUNNING, SRV_ENDED };

typedef struct srv_call { /* one HTTP request and its answer */
    struct srv *s;
    struct srv_conn *conn;         /* the loop's; NULL: the client is gone */
    const struct srv_route *route; /* NULL: none matched */
    arena a;
    http_request *req;
    buf body;
    double t_start;
    bool keep_alive, head_sent, counted; /* counted: in n_waiting (lock) */
    str origin;                    /* of the browser, if it is allowed; .n 0: none */
    http_reply reply;              /* a worker's until `done` */
    fb_upload *upload;
    bool upload_whole;             /* body holds the last piece */

    api_call api;
    srv_part *parts;               /* [api.n_parts] */
    toka_err refused;              /* the engine's word when it did not take a part; code 0: it took all */
    buf fresh;                     /* records of this step; the engine's thread */
    int fresh_tokens;

    int refs;                      /* (lock), all that follows too */
    enum srv_stage stage;
    bool queued, in_dirty;         /* in the ready list or with a worker; in the dirty list */
    bool gone, stalled, done, overflow, want_piece;
    int n_open, n_submitted;       /* engine requests without a last event; engine_ids known */
    int64_t n_tokens;
    double t_first, t_last;        /* of tokens */
    buf records, out;              /* packed and not fed; made and not taken by the loop */
    size_t unsent;                 /* bytes made that the socket has not taken */
    struct srv_call *next_ready, *next_dirty;
} srv_call;

typedef struct srv_route {
    const char *path;
    bool prefix;                   /* and all paths below it */
    unsigned methods;              /* bits 1 << http_method; 0: the handler refuses what it does not know */
    bool open;                     /* needs no key */
    bool early;                    /* answered while the model loads */
    void (*now)(srv *s, srv_call *c);    /* on the loop: quick, fills c->reply */
    void (*work)(srv *s, srv_call *c);   /* or on a worker: fills c->reply, or goes on until it is published */
    int api;                       /* enum api_route of srv_begin_api and srv_simple */
} srv_route;

/* ---- Metrics ---- */

static const double srv_seconds[SRV_BUCKETS] = {0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5,
                                                0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640};
static const double srv_counts[SRV_BUCKETS] = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5,
                                               1e6, 2e6, 5e6, 1e7};

static void srv_observe(srv_hist *h, double v, int64_t times) {
    int i = 0;
    while (i < SRV_BUCKETS && v > h->le[i]) i++;
    h->counts[i] += times, h->n += times, h->sum += v * (double)times;
}

static void srv_metrics_init(srv_metrics *m) {
    *m = (srv_metrics){0};
    m->ttft.le = m->itl.le = m->tpot.le = m->e2e.le = srv_seconds;
    m->prompt_tokens.le = m->output_tokens.le = m->params_n.le = srv_counts;
}

/* "# HELP", "# TYPE" and the value or values of one series. label: the model's, ready to stand in braces. */
static void srv_put_series(buf *b, const char *name, const char *type, const char *help, const char *label, double v) {
    buf_printf(b, "# HELP toka:%s %s\n# TYPE toka:%s %s\ntoka:%s{%s} %.17g\n", name, help, name, type, name, label, v);
}

static void srv_put_hist(buf *b, const char *name, const char *help, const char *label, const srv_hist *h) {
    int64_t sum = 0;
    buf_printf(b, "# HELP toka:%s %s\n# TYPE toka:%s histogram\n", name, help, name);
    for (int i = 0; i <= SRV_BUCKETS; i++) {
        sum += h->counts[i];
        if (i < SRV_BUCKETS) buf_printf(b, "toka:%s_bucket{%s,le=\"%g\"} %lld\n", name, label, h->le[i], (long long)sum);
    }
    buf_printf(b, "toka:%s_bucket{%s,le=\"+Inf\"} %lld\n", name, label, (long long)h->n);
    buf_printf(b, "toka:%s_sum{%s} %.17g\ntoka:%s_count{%s} %lld\n", name, label, h->sum, name, label, (long long)h->n);
}

static void srv_put_label_value(buf *b, str s) { /* the text format's escapes */
    for (size_t i = 0; i < s.n; i++)
        if (s.p[i] == '\n') buf_c(b, "\\n");
        else if (s.p[i] == '"' || s.p[i] == '\\') buf_char(b, '\\'), buf_char(b, s.p[i]);
        else buf_char(b, s.p[i]);
}

/* A counter for each value of a further label `key`; values that are NULL are left out. */
static void srv_put_labelled(buf *b, const char *name, const char *help, const char *label, const char *key,
                             const char *const *values, const double *counts, int n) {
    buf_printf(b, "# HELP toka:%s %s\n# TYPE toka:%s counter\n", name, help, name);
    for (int i = 0; i < n; i++)
        if (values[i]) buf_printf(b, "toka:%s{%s,%s=\"%s\"} %.17g\n", name, label, key, values[i], counts[i]);
}

/* Prometheus' text format 0.0.4. Stems, units and meanings are vLLM's; the engine's samples count as its requests do. */
static void srv_put_metrics(buf *b, const srv_metrics *m, const toka_stats *t, str model, int n_waiting, int n_connections) {
    static const char *const reasons[5] = {NULL, "stop", "length", "abort", "error"};
    static const char *const codes[6] = {NULL, NULL, "2xx", NULL, "4xx", "5xx"}, *const phases[3] = {"plan", "run", "commit"};
    buf label = {0};
    buf_c(&label, "engine=\"0\",model_name=\""), srv_put_label_value(&label, model), buf_char(&label, '"');
    const char *l = label.p;
    srv_put_series(b, "num_requests_running", "gauge", "Samples that the engine runs.", l, t->running);
    srv_put_series(b, "num_requests_waiting", "gauge", "Samples that wait for the engine.", l, t->waiting);
    srv_put_series(b, "kv_cache_usage_perc", "gauge", "Share of the KV cache held by running samples, 1 is all of it.", l,
                   t->kv_pages ? (double)t->kv_pages_used / t->kv_pages : 0);
    srv_put_series(b, "prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix tree.", l,
                   (double)t->prompt_tokens);
    srv_put_series(b, "prefix_cache_hits_total", "counter", "Prompt tokens found there.", l, (double)t->prompt_tokens_shared);
    srv_put_series(b, "num_preemptions_total", "counter", "Samples put back because pages ran out.", l, (double)t->preemptions);
    srv_put_series(b, "prompt_tokens_total", "counter", "Prompt tokens of samples that started.", l, (double)t->prompt_tokens);
    srv_put_series(b, "generation_tokens_total", "counter", "Tokens generated.", l, (double)t->output_tokens);
    srv_put_series(b, "attended_tokens_total", "counter", "Positions attended to, summed over tokens.", l, (double)t->attended);
    srv_put_series(b, "attended_tokens_shared_total", "counter", "Of these, in shared prefixes.", l, (double)t->attended_shared);
    srv_put_series(b, "engine_steps_total", "counter", "Forward steps.", l, (double)t->steps);
    srv_put_labelled(b, "engine_seconds_total", "Where the engine's time went; commit has the events.", l, "phase", phases,
                     (double[]){t->plan_s, t->run_s, t->commit_s}, 3);
    srv_put_labelled(b, "request_success_total", "Samples that ended, by reason.", l, "finished_reason", reasons, m->finished, 5);
    srv_put_labelled(b, "http_responses_total", "Answers by class of status.", l, "code", codes, m->statuses, 6);
    srv_put_series(b, "http_requests_waiting", "gauge", "Requests without a first token.", l, n_waiting);
    srv_put_series(b, "http_requests_rejected_total", "counter", "Requests refused because the queue was full.", l,
                   (double)m->rejected);
    srv_put_series(b, "http_connections", "gauge", "Open connections.", l, n_connections);
    srv_put_hist(b, "time_to_first_token_seconds", "From a request's last byte to its first token.", l, &m->ttft);
    srv_put_hist(b, "inter_token_latency_seconds", "Between tokens of a sample.", l, &m->itl);
    srv_put_hist(b, "request_time_per_output_token_seconds", "Mean time per token after the first.", l, &m->tpot);
    srv_put_hist(b, "e2e_request_latency_seconds", "From a request's last byte to its last token.", l, &m->e2e);
    srv_put_hist(b, "request_prompt_tokens", "Prompt tokens of a request.", l, &m->prompt_tokens);
    srv_put_hist(b, "request_generation_tokens", "Output tokens of a request.", l, &m->output_tokens);
    srv_put_hist(b, "request_params_n", "Samples of a request.", l, &m->params_n);
    buf_free(&label);
}

/* ---- Calls: references and lists; all with srv.lock held ---- */

static void srv_free_body(srv_call *c) {
    c->s->body_bytes -= (long long)c->body.n;
    buf_free(&c->body);
}

static void srv_call_free(srv_call *c) { /* the last reference is gone; any thread, without the lock */
    http_reply unused = {0};
    if (c->upload) fb_upload_close(c->upload, false, &unused);
    buf_free(&unused.headers), buf_free(&unused.body);
    api_free(&c->api);
    srv_free_body(c);
    buf_free(&c->reply.headers), buf_free(&c->reply.body);
    if (c->reply.fd_bytes > 0) close(c->reply.fd);
    buf_free(&c->fresh), buf_free(&c->records), buf_free(&c->out);
    arena_free(&c->a);
    free(c);
}

static void srv_uncount(srv_call *c) {
    if (c->counted) c->counted = false, c->s->n_waiting--, c->s->n_left++;
}

static bool srv_unref(srv_call *c, int n) { /* true: the caller frees it, after unlocking */
    assert(c->refs >= n);
    c->refs -= n;
    if (!c->refs) srv_uncount(c);
    return !c->refs;
}

static bool srv_wants_work(const srv_call *c) {
    if (c->queued || c->gone || c->stage == SRV_ENDED) return false;
    if (c->stage == SRV_NEW) return !c->want_piece;
    return !c->stalled && (!c->n_open || (c->records.n && (c->api.stream || c->records.n > SRV_FEW_RECORDS)));
}

static void srv_push_ready(srv_call *c) {
    srv *s = c->s;
    c->queued = true, c->refs++, c->next_ready = NULL;
    *s->ready_end = c, s->ready_end = &c->next_ready;
    if (s->n_idle) pthread_cond_signal(&s->work);
}

static void srv_push_dirty(srv_call *c) {
    srv *s = c->s;
    if (c->in_dirty) return;
    c->in_dirty = true, c->refs++, c->next_dirty = s->dirty, s->dirty = c;
    if (s->woken) return;
    s->woken = true;
    ssize_t unused = write(s->wake_fd, &(uint64_t){1}, 8);
    (void)unused; /* can only fail when the counter is full: the loop is awake then */
}

/* The client is gone: nothing more is made for it, its engine requests end. The connection's reference goes. The loop. */
static void srv_abandon(srv_call *c) {
    srv *s = c->s;
    pthread_mutex_lock(&s->lock);
    c->gone = true;
    int n = c->n_open ? c->n_submitted : 0;
    srv_uncount(c);
    pthread_mutex_unlock(&s->lock);
    c->conn = NULL;
    for (int i = 0; i < n; i++) toka_cancel(s->t, c->api.parts[i].engine_id);
    pthread_mutex_lock(&s->lock);
    bool last = srv_unref(c, 1);
    pthread_mutex_unlock(&s->lock);
    if (last) srv_call_free(c);
}

/* ---- Answers ---- */

static void srv_error(srv_call *c, int status, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void srv_error(srv_call *c, int status, const char *fmt, ...) {
    toka_err e;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e.msg, sizeof e.msg, fmt, ap);
    va_end(ap);
    c->reply.status = status;
    buf_clear(&c->reply.body);
    api_error(&c->reply.body, status, e.msg, NULL, NULL, NULL);
    if (status == 401) buf_c(&c->reply.headers, "WWW-Authenticate: Bearer\r\n");
    if (status == 503) buf_c(&c->reply.headers, "Retry-After: 1\r\n");
}

static void srv_put_cors(buf *b, str origin) {
    if (!origin.n) return;
    buf_c(b, "Access-Control-Allow-Origin: "), buf_str(b, origin);
    buf_c(b, "\r\nVary: Origin\r\n");
}

/* Status line, headers and body of a whole answer. The body of a HEAD is left out, its length told. */
static void srv_put_reply(buf *b, srv_call *c) {
    http_reply *r = &c->reply;
    int64_t length = r->fd_bytes > 0 ? r->fd_bytes : (int64_t)r->body.n;
    const char *type = r->type ? r->type : "application/json";
    if (!r->status) r->status = 200;
    if (c->s->draining) c->keep_alive = false;
    srv_put_cors(&r->headers, c->origin);
    http_put_head(b, r->status, r->status == 204 ? NULL : type, length, c->keep_alive, (int64_t)time(NULL),
                  buf_view(&r->headers));
    bool head = c->req && c->req->method == HTTP_HEAD;
    if (!head && r->fd_bytes <= 0) buf_str(b, buf_view(&r->body));
    if (head && r->fd_bytes > 0) close(r->fd), r->fd_bytes = 0;
    buf_free(&r->headers), buf_free(&r->body);
}

/* What a worker made goes to the loop; takes `made`. done: it was the last. */
static void srv_publish(srv_call *c, buf *made, bool done) {
    srv *s = c->s;
    pthread_mutex_lock(&s->lock);
    c->unsent += made->n;
    c->stalled = !done && c->unsent > SRV_MAX_UNSENT;
    if (!c->out.n) {
        buf old = c->out;
        c->out = *made, *made = old;
    } else {
        buf_str(&c->out, buf_view(made));
    }
    if (done) c->stage = SRV_ENDED, c->done = true, srv_uncount(c);
    if (!c->gone) srv_push_dirty(c);
    pthread_mutex_unlock(&s->lock);
    buf_free(made);
}

static void srv_publish_reply(srv_call *c) {
    buf made = {0};
    srv_put_reply(&made, c);
    srv_publish(c, &made, true);
}

/* ---- How long the queue is, in seconds ---- */

/* A call enters a queue of n_waiting, from which `left` went so far. An empty one tells nothing of how fast a full one moves. */
static void srv_pace_look(srv_pace *p, int n_waiting, int64_t left, double now) {
    if (!n_waiting || !p->t[0]) p->t[0] = p->t[1] = now, p->left[0] = p->left[1] = left;
    if (now - p->t[1] > SRV_PACE_S) p->t[0] = p->t[1], p->left[0] = p->left[1], p->t[1] = now, p->left[1] = left;
}

/* Seconds until all that wait have left at the pace of late, from 1 to SRV_MAX_RETRY_S. While none has left, as if one would now. */
static int srv_pace_retry(const srv_pace *p, int n_waiting, int64_t left, double now) {
    double seconds = n_waiting * MAX(now - p->t[0], 0.0) / (double)MAX(left - p->left[0], (int64_t)1);
    return seconds < 1 ? 1 : seconds > SRV_MAX_RETRY_S ? SRV_MAX_RETRY_S : (int)ceil(seconds);
}

static void srv_put_retry(srv_call *c) { /* without the lock */
    srv *s = c->s;
    double now = os_now();
    pthread_mutex_lock(&s->lock);
    srv_pace_look(&s->pace, s->n_waiting, s->n_left, now);
    int seconds = srv_pace_retry(&s->pace, s->n_waiting, s->n_left, now);
    pthread_mutex_unlock(&s->lock);
    buf_printf(&c->reply.headers, "Retry-After: %d\r\n", seconds);
}

/* ---- Events: the engine's thread ---- */

/* The tokens of this step, one lock for all of them. */
static void srv_count_tokens(srv_call *c, double now) {
    srv_metrics *m = &c->s->m;
    if (!c->fresh_tokens) return;
    if (!c->t_first) {
        srv_uncount(c);
        m->first_tokens++;
        c->t_first = now;
        srv_observe(&m->ttft, now - c->t_start, 1);
    } else {
        srv_observe(&m->itl, now - c->t_last, c->fresh_tokens);
    }
    c->t_last = now, c->n_tokens += c->fresh_tokens, c->fresh_tokens = 0;
}

static void srv_count_end(srv_call *c, double now) { /* the last event of the last part */
    srv_metrics *m = &c->s->m;
    double later = (double)c->n_tokens / MAX(c->api.n_choices, 1) - 1; /* tokens of a sample behind its first */
    if (!c->t_first) return;
    srv_observe(&m->e2e, now - c->t_start, 1);
    if (later > 0) srv_observe(&m->tpot, (c->t_last - c->t_first) / later, 1);
    srv_observe(&m->prompt_tokens, (double)c->api.n_prompt_tokens, 1);
    srv_observe(&m->output_tokens, (double)c->n_tokens, 1);
    srv_observe(&m->params_n, (double)c->api.n_choices / c->api.n_parts, 1);
}

static int srv_on_event(void *user, const toka_event *ev) {
    srv_part *p = user;
    srv_call *c = p->call;
    srv *s = c->s;
    api_pack(p->part, ev, &c->fresh);
    c->fresh_tokens += ev->sample >= 0 && ev->id >= 0;
    bool ended = ev->finish != TOKA_RUNNING;
    p->n_left -= ended;
    if (ev->more && p->n_left && !ended) return 0;
    double now = os_now();
    pthread_mutex_lock(&s->lock);
    s->m.finished[ev->finish] += ended;
    srv_count_tokens(c, now);
    if (c->gone) buf_clear(&c->fresh);
    buf_str(&c->records, buf_view(&c->fresh));
    buf_clear(&c->fresh);
    bool last = false;
    if (!p->n_left) {
        if (!--c->n_open) srv_count_end(c, now);
        last = true;
    }
    if (c->records.n > SRV_MAX_RECORDS && c->stalled && !c->overflow) c->overflow = true, srv_push_dirty(c);
    if (srv_wants_work(c)) srv_push_ready(c);
    last = last && srv_unref(c, 1);
    pthread_mutex_unlock(&s->lock);
    if (last) srv_call_free(c);
    return 0;
}

/* ---- Completions: workers ---- */

/* An unknown field of some body, each name once. Names are what a client sent: shown short and as plain ASCII. */
static void srv_unknown(void *user, str name) {
    srv *s = user;
    buf line = {0};
    for (size_t i = 0; i < MIN(name.n, (size_t)60); i++) buf_char(&line, name.p[i] > ' ' && name.p[i] < 0x7F ? name.p[i] : '?');
    buf_char(&line, '\n');
    pthread_mutex_lock(&s->lock);
    bool known = s->n_unknown >= SRV_MAX_UNKNOWN;
    for (str rest = buf_view(&s->unknown); rest.n && !known;) {
        size_t n = (size_t)str_find(rest, STR("\n"), 0) + 1;
        known = str_eq(str_sub(rest, 0, n), buf_view(&line));
        rest = str_sub(rest, n, rest.n);
    }
    if (!known) s->n_unknown++, buf_str(&s->unknown, buf_view(&line));
    pthread_mutex_unlock(&s->lock);
    if (!known) fprintf(stderr, "toka: a request has an unknown field, ignored from here on: %s", line.p);
    buf_free(&line);
}

static uint64_t srv_serial(srv *s, int which) { /* splitmix64's mixing of a counter and this process' random number */
    uint64_t z = s->random[which] + 0x9E3779B97F4A7C15u * (uint64_t)++s->n_serial;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* Hands the parts to the engine. Those it did not get, after an error or because the client is gone, will have no events. */
static void srv_submit(srv *s, srv_call *c) {
    int n = c->api.n_parts, i;
    bool gone = false;
    pthread_mutex_lock(&s->lock);
    c->n_open = n, c->refs += n, c->stage = SRV_RUNNING;
    pthread_mutex_unlock(&s->lock);
    for (i = 0; i < n && !gone; i++) {
        api_part *part = &c->api.parts[i];
        c->parts[i] = (srv_part){c, part, MAX(1, part->q.n)};
        if (toka_submit(s->t, &part->q, srv_on_event, &c->parts[i], &part->engine_id, &c->refused)) break;
        c->refused.code = 0;
        pthread_mutex_lock(&s->lock);
        c->n_submitted = i + 1, gone = c->gone;
        pthread_mutex_unlock(&s->lock);
        if (gone) toka_cancel(s->t, part->engine_id); /* the loop did so for those before */
    }
    if (i == n) return;
    if (!gone)
        for (int k = 0; k < i; k++) toka_cancel(s->t, c->api.parts[k].engine_id);
    pthread_mutex_lock(&s->lock);
    c->n_open -= n - i, c->refs -= n - i; /* the worker has one more */
    pthread_mutex_unlock(&s->lock);
}

static void srv_begin_api(srv *s, srv_call *c) {
    toka_err e;
    c->api.serial[0] = srv_serial(s, 0), c->api.serial[1] = srv_serial(s, 1);
    c->api.created = (int64_t)time(NULL);
    c->api.user = c;
    int code = api_parse(&s->model, (enum api_route)c->route->api, buf_view(&c->body), &c->api, &e);
    srv_free_body(c);
    if (code) {
        c->reply.status = c->api.status;
        api_error(&c->reply.body, c->api.status, e.msg, c->api.type, c->api.param, c->api.code);
        srv_publish_reply(c);
        return;
    }
    c->parts = arena_alloc(&c->a, (size_t)c->api.n_parts * sizeof *c->parts);
    srv_submit(s, c);
}

static void srv_put_stream_head(buf *b, srv_call *c) {
    buf more = {0};
    bool chunked = c->req->minor > 0;
    c->head_sent = true;
    c->keep_alive = c->keep_alive && chunked && !c->s->draining;
    buf_c(&more, "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n");
    srv_put_cors(&more, c->origin);
    http_put_head(b, 200, "text/event-stream; charset=utf-8", chunked ? HTTP_CHUNKED : HTTP_UNTIL_CLOSE, c->keep_alive,
                  (int64_t)time(NULL), buf_view(&more));
    buf_free(&more);
}

static void srv_refuse(srv_call *c) { /* the engine did not take all parts */
    int status = c->refused.code == TOKA_E_USE ? 429 : 500;
    srv_error(c, status, "%s", c->refused.msg);
    if (status == 429) srv_put_retry(c);
    srv_publish_reply(c);
}

/* Records to text. last: there will be none after these. */
static void srv_continue(srv_call *c, str records, bool last) {
    buf text = {0}, made = {0};
    if (last && c->refused.code) {
        srv_refuse(c);
        return;
    }
    api_feed(&c->api, records, &text);
    if (last && c->api.broken && !c->head_sent) c->api.stream = false, buf_clear(&text); /* nothing is out: it can have a status */
    int status = last ? api_finish(&c->api, &text) : 0;
    if (!c->api.stream) {
        if (last) c->reply.status = status, c->reply.body = text, srv_publish_reply(c);
        return;
    }
    bool chunked = c->req->minor > 0;
    if (!c->head_sent && (text.n || last)) srv_put_stream_head(&made, c);
    if (chunked) http_put_chunk(&made, buf_view(&text));
    else buf_str(&made, buf_view(&text));
    if (chunked && last) http_put_last_chunk(&made);
    buf_free(&text);
    if (made.n || last) c->reply.status = 200, srv_publish(c, &made, last);
}

/* ---- Other handlers of workers ---- */

static void srv_simple(srv *s, srv_call *c) {
    toka_err e;
    int status = 0;
    const char *param = NULL;
    if (api_simple(&s->model, (enum api_route)c->route->api, buf_view(&c->body), &c->reply.body, &e, &status, &param)) {
        c->reply.status = status;
        buf_clear(&c->reply.body);
        api_error(&c->reply.body, status, e.msg, NULL, param, NULL);
    }
    srv_publish_reply(c);
}

static void srv_files(srv *s, srv_call *c) {
    fb_handle(s->files, c->req, buf_view(&c->body), &c->reply);
    srv_publish_reply(c);
}

/* A piece of an upload to disk; the next is asked for, or the answer given. */
static void srv_upload(srv *s, srv_call *c) {
    str type = http_find(c->req, "content-type");
    bool ok = c->upload || (c->upload = fb_upload_open(s->files, type.p ? type : STR(""), &c->reply)) != NULL;
    if (ok) ok = fb_upload_put(c->upload, buf_view(&c->body), &c->reply);
    srv_free_body(c);
    if (ok && !c->upload_whole) {
        pthread_mutex_lock(&s->lock);
        c->want_piece = true; /* srv_worker tells the loop when it has let go of the call */
        pthread_mutex_unlock(&s->lock);
        return;
    }
    http_reply unused = {0};
    if (c->upload) fb_upload_close(c->upload, ok, ok ? &c->reply : &unused);
    buf_free(&unused.headers), buf_free(&unused.body);
    c->upload = NULL;
    if (!c->upload_whole) c->keep_alive = false; /* the rest of the body will not be read */
    srv_publish_reply(c);
}

static void *srv_worker(void *arg) {
    srv *s = arg;
    pthread_setname_np(pthread_self(), "toka-worker");
    pthread_mutex_lock(&s->lock);
    for (;;) {
        for (s->n_idle++; !s->ready && !s->stopping;) pthread_cond_wait(&s->work, &s->lock);
        s->n_idle--;
        if (!s->ready) break;
        srv_call *c = s->ready;
        if (!(s->ready = c->next_ready)) s->ready_end = &s->ready;
        enum srv_stage stage = c->gone ? SRV_ENDED : c->stage;
        bool last = !c->n_open;
        buf records = c->records;
        c->records = (buf){0};
        pthread_mutex_unlock(&s->lock);
        if (stage == SRV_NEW) c->route->work(s, c);
        if (stage == SRV_RUNNING) srv_continue(c, buf_view(&records), last);
        buf_free(&records);
        pthread_mutex_lock(&s->lock);
        c->queued = false;
        if (c->want_piece && !c->gone) srv_push_dirty(c);
        if (srv_wants_work(c)) srv_push_ready(c);
        if (srv_unref(c, 1)) {
            pthread_mutex_unlock(&s->lock);
            srv_call_free(c);
            pthread_mutex_lock(&s->lock);
        }
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ---- Handlers of the loop ---- */

static void srv_health(srv *s, srv_call *c) {
    int phase = s->phase;
    if (phase == SRV_LOADING) srv_error(c, 503, "the model is loading");
    else if (phase == SRV_FAILED) srv_error(c, 503, "the engine has failed");
    else if (s->wedged) srv_error(c, 503, "requests are under way, but the engine has made no step for %g s", s->o->step_timeout);
    else if (s->draining) srv_error(c, 503, "the server is shutting down");
    else buf_c(&c->reply.body, "{\"status\":\"ok\"}");
}

static void srv_version(srv *s, srv_call *c) { (void)s, buf_c(&c->reply.body, "{\"version\":\"" TOKA_VERSION "\"}"); }

static void srv_page_reply(srv *s, srv_call *c) {
    (void)s;
    c->reply.type = "text/html; charset=utf-8";
    buf_c(&c->reply.headers, "Content-Security-Policy: default-src 'self' 'unsafe-inline'; img-src data:\r\n");
    buf_put(&c->reply.body, srv_page, sizeof srv_page - 1);
}

static void srv_models(srv *s, srv_call *c) {
    str path = c->req->path, id = path.n > 11 ? str_sub(path, 11, path.n) : STR("");
    if (!api_models(&s->model, id, s->started, &c->reply.body)) srv_error(c, 404, "the model '%.*s' does not exist", STRF(id));
}

static int srv_n_connections(const srv *s);

static void srv_metrics_reply(srv *s, srv_call *c) {
    toka_stats t = toka_get_stats(s->t);
    c->reply.type = "text/plain; version=0.0.4; charset=utf-8";
    pthread_mutex_lock(&s->lock);
    srv_metrics m = s->m;
    int n_waiting = s->n_waiting;
    pthread_mutex_unlock(&s->lock);
    srv_put_metrics(&c->reply.body, &m, &t, str_c(s->name), n_waiting, srv_n_connections(s));
}

/* ---- Routes ---- */

enum { SRV_GET = 1 << HTTP_GET | 1 << HTTP_HEAD, SRV_POST = 1 << HTTP_POST };

static const srv_route srv_routes[] = {
    {"/", false, SRV_GET, true, true, srv_page_reply, NULL, 0},
    {"/health", false, SRV_GET, true, true, srv_health, NULL, 0},
    {"/version", false, SRV_GET, true, true, srv_version, NULL, 0},
    {"/metrics", false, SRV_GET, false, false, srv_metrics_reply, NULL, 0},
    {"/v1/models", true, SRV_GET, false, false, srv_models, NULL, 0},
    {"/v1/completions", false, SRV_POST, false, false, NULL, srv_begin_api, API_COMPLETIONS},
    {"/v1/chat/completions", false, SRV_POST, false, false, NULL, srv_begin_api, API_CHAT},
    {"/tokenize", false, SRV_POST, false, false, NULL, srv_simple, API_TOKENIZE},
    {"/detokenize", false, SRV_POST, false, false, NULL, srv_simple, API_DETOKENIZE},
    {"/v1/files", true, 0, false, false, NULL, srv_files, 0},
    {"/v1/batches", true, 0, false, false, NULL, srv_files, 0},
};
static const srv_route srv_upload_route = {"/v1/files", false, SRV_POST, false, false, NULL, srv_upload, 0};

static const srv_route *srv_find_route(const http_request *r) {
    if (r->method == HTTP_POST && str_is(r->path, srv_upload_route.path)) return &srv_upload_route;
    for (int i = 0; i < COUNT(srv_routes); i++) {
        str path = str_c(srv_routes[i].path);
        if (str_eq(r->path, path)) return &srv_routes[i];
        bool below = str_starts(r->path, path) && r->path.n > path.n && r->path.p[path.n] == '/';
        if (srv_routes[i].prefix && below) return &srv_routes[i];
    }
    return NULL;
}

/* Takes the same time for every key of one length, so that no answer's time tells how much of a guess was right. */
static bool srv_key_is(str given, const char *key) {
    size_t n = strlen(key);
    volatile unsigned char differs = given.n != n;
    for (size_t i = 0; i < n; i++) differs |= (unsigned char)((given.n ? given.p[i % given.n] : 0) ^ key[i]);
    return !differs;
}

static bool srv_allowed(const srv_options *o, const http_request *r) {
    str given = http_find(r, "authorization");
    bool bearer = given.n > 7 && http_same(str_sub(given, 0, 7), "bearer "), found = false;
    if (!o->n_keys) return true;
    given = bearer ? http_trim(str_sub(given, 7, given.n)) : STR("");
    for (int i = 0; i < o->n_keys; i++) found |= srv_key_is(given, o->keys[i]);
    return found;
}

/* The request's origin if browsers may come from there. */
static str srv_origin(const srv_options *o, const http_request *r) {
    str origin = http_find(r, "origin"), list = o->origins ? str_c(o->origins) : STR(""), each;
    while (origin.n && http_next(&list, &each))
        if (str_eq(each, origin) || str_is(each, "*")) return origin;
    return STR("");
}

static void srv_put_allow(buf *b, const char *name, unsigned methods) {
    static const char *const names[] = {"GET", "HEAD", "POST", "DELETE", "OPTIONS"};
    bool any = false;
    buf_printf(b, "%s: ", name);
    for (int i = 0; i < COUNT(names); i++)
        if (methods & 1u << i || i == HTTP_OPTIONS) buf_printf(b, any ? ", %s" : "%s", names[i]), any = true;
    buf_c(b, "\r\n");
}

/* OPTIONS: what may be done here; a browser's question before it sends a request from an allowed origin. */
static void srv_options_reply(srv_call *c) {
    unsigned methods = c->route && c->route->methods ? c->route->methods : SRV_GET | SRV_POST | 1 << HTTP_DELETE;
    c->reply.status = 204;
    srv_put_allow(&c->reply.headers, "Allow", methods);
    if (!c->origin.n) return;
    srv_put_allow(&c->reply.headers, "Access-Control-Allow-Methods", methods);
    buf_c(&c->reply.headers, "Access-Control-Allow-Headers: Authorization, Content-Type\r\nAccess-Control-Max-Age: 600\r\n");
}

/* Looks at a head whose body is still to come. True: c->reply has an answer already. */
static bool srv_check(srv *s, srv_call *c) {
    http_request *r = c->req;
    buf path = {0};
    c->keep_alive = r->keep_alive;
    c->origin = srv_origin(s->o, r);
    bool ok = http_decode(r->path, false, &path);
    if (ok) r->path = arena_str(&c->a, buf_view(&path));
    buf_free(&path);
    if (!ok) return srv_error(c, 400, "the path has a broken percent escape"), true;
    c->route = srv_find_route(r);
    if (!c->route && !str_is(r->path, "*")) return srv_error(c, 404, "there is nothing at %.*s", STRF(r->path)), true;
    if (r->method == HTTP_OPTIONS) return srv_options_reply(c), true;
    if (!c->route->open && !srv_allowed(s->o, r)) return srv_error(c, 401, "no API key, or one that is not valid here"), true;
    if (c->route->methods && !(c->route->methods >> r->method & 1)) {
        srv_error(c, 405, "%s is not answered to this method", c->route->path);
        return srv_put_allow(&c->reply.headers, "Allow", c->route->methods), true;
    }
    str coding = http_find(r, "content-encoding"), type = http_find(r, "content-type");
    if (coding.n && !http_same(coding, "identity")) return srv_error(c, 415, "Content-Encoding: expected none"), true;
    ptrdiff_t semi = str_find(type, STR(";"), 0);
    bool is_json = !type.p || http_same(http_trim(str_sub(type, 0, semi < 0 ? type.n : (size_t)semi)), "application/json");
    if (c->route->methods == SRV_POST && c->route != &srv_upload_route && !is_json)
        return srv_error(c, 415, "Content-Type: expected application/json"), true;
    if (!c->route->early && s->phase == SRV_LOADING) return srv_error(c, 503, "the model is loading"), true;
    if (!c->route->early && s->phase == SRV_FAILED) return srv_error(c, 503, "the engine has failed"), true;
    return false;
}

static int64_t srv_body_limit(const srv *s, const srv_call *c) {
    if (c->route == &srv_upload_route) return s->o->max_upload_bytes;
    bool prompt = c->route && c->route->work && c->route->work != srv_files;
    return prompt ? s->o->max_body_bytes : SRV_SIMPLE_BYTES;
}

/* The request is whole. True: c->reply has the answer; false: it is with the workers, who publish one. */
static bool srv_dispatch(srv *s, srv_call *c) {
    bool api = c->route->work == srv_begin_api;
    if (c->route->now) return c->route->now(s, c), true;
    pthread_mutex_lock(&s->lock);
    bool full = api && s->n_waiting >= s->o->max_queue;
    if (full) s->m.rejected++;
    else {
        if (api) srv_pace_look(&s->pace, s->n_waiting, s->n_left, c->t_start), c->counted = true, s->n_waiting++;
        c->want_piece = false;
        srv_push_ready(c);
    }
    pthread_mutex_unlock(&s->lock);
    if (!full) return false;
    srv_error(c, 429, "%d requests wait already, as many as --max-queue allows", s->o->max_queue);
    srv_put_retry(c);
    return true;
}

/* ===========================================================================
 * MARK: 26. Server: connections [os]
 * One thread owns every socket and waits in epoll. A connection goes round:
 *
 *     SRV_HEAD --http_parse_head, srv_check--> SRV_BODY --http_body_read, srv_dispatch--> SRV_BUSY --the answer--> SRV_HEAD
 *                                                 +<--> SRV_PIECE: a worker stores a piece of an upload
 *     SRV_LAST: an answer behind which the connection closes --it is sent--> SRV_LINGER: what the client still sends is thrown
 *               away for a moment, because closing with bytes unread would reset the connection and destroy the answer
 *
 * Pipelined requests wait in `in` until the answer before them is made. Every state has a deadline; one pass a second over all
 * connections looks at them: simpler than timers, a tenth of a millisecond at ten thousand connections, and exact enough.
 * =========================================================================== */

enum {
    SRV_READ_BYTES = 64 << 10,  /* of one read, and what is held of pipelined requests */
    SRV_SEND_BYTES = 1 << 20,   /* of one write */
    SRV_SPARE_FDS = 64,         /* for files, the model, libraries */
    SRV_LINGER_BYTES = 16 << 20, /* thrown away at most, in ... */
    SRV_LINGER_S = 2,
    SRV_BODY_RATE = 4096,       /* bytes a second that a body must reach behind the first --read-timeout seconds */
    SRV_MAX_LISTENERS = 8,
    SRV_EVENTS = 256,           /* of one round */
    SRV_TICK_MS = 100,          /* signals and deadlines are looked at so often */
    SRV_FAILED_S = 1,           /* a server whose engine fails tells everybody for so long before it hangs up ... */
    SRV_FAILED_LAST_S = 5,      /* ... and ends after so long, whatever is still to be sent */
};

enum srv_conn_state { SRV_HEAD, SRV_BODY, SRV_PIECE, SRV_BUSY, SRV_LAST, SRV_LINGER };

typedef struct srv_conn {
    int fd;
    enum srv_conn_state state;
    unsigned events;        /* that epoll looks for */
    bool eof, closed;       /* the client has sent all; is being freed */
    bool sending;           /* the deadline is that of sending */
    buf in, out;            /* in: not parsed from in_at on; out: not sent from out_at on */
    size_t in_at, in_seen, out_at; /* in_seen: bytes of a head that http_parse_head has seen, 0: none has come */
    int file;               /* sent behind out, if file_left > 0 */
    off_t file_at;
    int64_t file_left;
    http_body body;
    srv_call *call;         /* from a whole head to the end of its answer */
    double deadline, t_state; /* 0: none; when the state, or in SRV_HEAD the head, began */
    int64_t lingered;       /* bytes thrown away */
    struct srv_conn *next, *before;
} srv_conn;

typedef struct srv_loop {
    int epoll, listeners[SRV_MAX_LISTENERS], n_listeners;
    bool accepting;         /* the listeners are in epoll */
    bool said_full;         /* that no more connections fit: told once */
    int n_conns, max_conns;
    srv_conn *conns, *dead; /* dead: freed at the end of the round, since events of this round may name them */
    char *scratch;          /* [SRV_READ_BYTES] */
    http_request head;      /* being parsed */
    double now;             /* of this round */
    double t_second, t_status, t_step; /* last looks: deadlines, status line, and when the engine last made a step */
    toka_stats last;        /* at the last status line */
    int64_t last_steps;
} srv_loop;

static int srv_n_connections(const srv *s) { return s->loop->n_conns; }

/* ---- Ends of a connection ---- */

static bool srv_unsent(const srv_conn *k) { return k->out_at < k->out.n || k->file_left > 0; }

static void srv_want(srv *s, srv_conn *k) { /* tells epoll what to look for */
    bool reads = !k->eof && (k->state == SRV_LINGER || k->in.n - k->in_at < SRV_READ_BYTES);
    unsigned events = (reads ? EPOLLIN : 0u) | (k->eof ? 0u : (unsigned)EPOLLRDHUP) | (srv_unsent(k) ? EPOLLOUT : 0u);
    if (k->closed || events == k->events) return;
    k->events = events;
    epoll_ctl(s->loop->epoll, EPOLL_CTL_MOD, k->fd, &(struct epoll_event){.events = events, .data.ptr = k});
}

static void srv_close(srv *s, srv_conn *k) {
    srv_loop *l = s->loop;
    if (k->closed) return;
    k->closed = true;
    if (k->call) srv_abandon(k->call);
    k->call = NULL;
    close(k->fd);
    if (k->file_left > 0) close(k->file);
    if (k->before) k->before->next = k->next;
    else l->conns = k->next;
    if (k->next) k->next->before = k->before;
    k->next = l->dead, l->dead = k;
    l->n_conns--;
}

static void srv_bury(srv_loop *l) {
    for (srv_conn *k = l->dead, *next; k; k = next) {
        next = k->next;
        buf_free(&k->in), buf_free(&k->out);
        free(k);
    }
    l->dead = NULL;
}

/* ---- Sending ---- */

/* Bytes for the socket; takes `made`. */
static void srv_append(srv_conn *k, buf *made) {
    if (k->out_at == k->out.n) {
        buf_free(&k->out);
        k->out = *made, k->out_at = 0;
    } else {
        buf_str(&k->out, buf_view(made));
        buf_free(made);
    }
    *made = (buf){0};
}

/* What the socket takes now, but others want their turn, too. False: the connection is lost. */
static bool srv_send_some(srv_conn *k) {
    for (int round = 0; round < 4 && srv_unsent(k); round++) {
        bool text = k->out_at < k->out.n;
        size_t most = (size_t)MIN(text ? (int64_t)(k->out.n - k->out_at) : k->file_left, (int64_t)SRV_SEND_BYTES);
        ssize_t n = text ? send(k->fd, k->out.p + k->out_at, most, MSG_NOSIGNAL) : sendfile(k->fd, k->file, &k->file_at, most);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return true;
        if (n <= 0) return false; /* 0: the file got shorter; its length was promised */
        k->sending = false;       /* progress: a new deadline */
        if (text) k->out_at += (size_t)n;
        else if (!(k->file_left -= n)) close(k->file);
    }
    return true;
}

/* From the state; a client that takes no byte has --write-timeout from its last one on. */
static void srv_set_deadline(srv *s, srv_conn *k) {
    const srv_options *o = s->o;
    bool unsent = srv_unsent(k);
    if (unsent && k->sending) return;
    k->sending = unsent;
    if (unsent) k->deadline = s->loop->now + o->write_timeout;
    else if (k->state == SRV_HEAD) k->deadline = k->t_state + (k->in_seen ? o->read_timeout : o->keep_alive);
    else if (k->state == SRV_BODY) k->deadline = k->t_state + o->read_timeout + (double)k->call->body.n / SRV_BODY_RATE;
    else if (k->state == SRV_LINGER) k->deadline = k->t_state + SRV_LINGER_S;
    else k->deadline = 0;
}

static void srv_enter(srv *s, srv_conn *k, enum srv_conn_state state) { k->state = state, k->t_state = s->loop->now; }

/* The answer is out and was the last. */
static void srv_linger(srv *s, srv_conn *k) {
    if (k->eof) {
        srv_close(s, k);
        return;
    }
    shutdown(k->fd, SHUT_WR);
    srv_enter(s, k, SRV_LINGER);
    buf_free(&k->in), k->in_at = 0;
}

/* A stream whose reader catches up is made again. */
static void srv_unstall(srv_conn *k) {
    srv_call *c = k->call;
    pthread_mutex_lock(&c->s->lock);
    c->unsent = k->out.n - k->out_at + c->out.n;
    if (c->stalled && c->unsent < SRV_MAX_UNSENT / 2) {
        c->stalled = false;
        if (srv_wants_work(c)) srv_push_ready(c);
    }
    pthread_mutex_unlock(&c->s->lock);
}

static void srv_send(srv *s, srv_conn *k) {
    if (k->closed) return;
    if (!srv_send_some(k)) {
        srv_close(s, k);
        return;
    }
    if (k->out_at == k->out.n) buf_free(&k->out), k->out_at = 0;
    if (k->call && k->state == SRV_BUSY) srv_unstall(k);
    if (k->state == SRV_LAST && !srv_unsent(k)) srv_linger(s, k);
    if (!k->closed) srv_set_deadline(s, k);
}

/* ---- Calls of a connection ---- */

static srv_call *srv_call_new(srv *s, srv_conn *k) {
    srv_call *c = mem_zalloc(sizeof *c);
    *c = (srv_call){.s = s, .conn = k, .refs = 1, .t_start = s->loop->now};
    return k->call = c;
}

/* All bytes of the answer are in k->out: the call goes, the connection is ready for its next, or ends. */
static void srv_end_call(srv *s, srv_conn *k) {
    srv_call *c = k->call;
    bool keep = c->keep_alive && !s->draining;
    if (c->reply.fd_bytes > 0) k->file = c->reply.fd, k->file_left = c->reply.fd_bytes, k->file_at = 0, c->reply.fd_bytes = 0;
    pthread_mutex_lock(&s->lock);
    s->m.statuses[MIN(MAX(c->reply.status / 100, 0), 5)]++;
    c->stage = SRV_ENDED;
    bool last = srv_unref(c, 1);
    pthread_mutex_unlock(&s->lock);
    k->call = NULL, c->conn = NULL;
    if (last) srv_call_free(c);
    srv_enter(s, k, keep ? SRV_HEAD : SRV_LAST);
    k->in_seen = 0;
}

static void srv_answer(srv *s, srv_conn *k) { /* with k->call->reply */
    buf made = {0};
    srv_put_reply(&made, k->call);
    srv_append(k, &made);
    srv_end_call(s, k);
}

/* A request that cannot be read on: its answer is the connection's last. */
static void srv_answer_last(srv *s, srv_conn *k, int status, const char *why) {
    srv_call *c = k->call ? k->call : srv_call_new(s, k);
    c->keep_alive = false;
    if (status) srv_error(c, status, "%s", why);
    srv_answer(s, k);
}

static const char *srv_why(int status) { /* of a status that chapter 20 gave */
    switch (status) {
    case 413: return "the body is longer than this server takes; see --max-body-bytes and --max-upload-bytes";
    case 414: return "the target is too long";
    case 417: return "Expect: only 100-continue is known";
    case 431: return "the headers are too long or too many";
    case 501: return "Transfer-Encoding: only chunked is known";
    case 505: return "only HTTP/1.0 and HTTP/1.1 are spoken here";
    default: return "this is not a well-formed HTTP/1.1 request";
    }
}

/* ---- Reading ---- */

/* A whole head: looks at what is asked. */
static void srv_on_head(srv *s, srv_conn *k, str head) {
    srv_call *c = srv_call_new(s, k);
    c->req = arena_alloc(&c->a, sizeof *c->req);
    http_parse_head(arena_str(&c->a, head), c->req); /* again, so that its slices live as long as the call */
    bool has_body = c->req->chunked || c->req->length, answered = srv_check(s, c);
    int status = answered ? 0 : http_body_init(&k->body, c->req, srv_body_limit(s, c));
    if (status || (answered && has_body)) {
        srv_answer_last(s, k, status, srv_why(status));
    } else if (answered) {
        srv_answer(s, k);
    } else {
        buf go = {0};
        if (c->req->expects_continue && has_body && k->in_at == k->in.n)
            buf_c(&go, "HTTP/1.1 100 Continue\r\n\r\n"), srv_append(k, &go);
        srv_enter(s, k, SRV_BODY);
    }
}

/* Bytes of a head. True: it is whole, or answered. */
static bool srv_read_head(srv *s, srv_conn *k) {
    srv_loop *l = s->loop;
    str rest = str_sub(buf_view(&k->in), k->in_at, k->in.n);
    if (!rest.n || rest.n == k->in_seen) return false;
    bool first = !k->in_seen;
    if (first) k->t_state = l->now;
    bool line = memchr(rest.p + k->in_seen, '\n', rest.n - k->in_seen) != NULL;
    if (!first && !line && rest.n < HTTP_MAX_HEAD) { /* cannot have become whole */
        k->in_seen = rest.n;
        return false;
    }
    ptrdiff_t used = http_parse_head(rest, &l->head);
    k->in_seen = rest.n;
    if (!used) return false;
    if (used < 0) {
        srv_answer_last(s, k, (int)-used, srv_why((int)-used));
        return true;
    }
    k->in_at += (size_t)used;
    srv_on_head(s, k, str_sub(rest, 0, (size_t)used));
    return true;
}

/* Bytes of a body. True: it is whole, or answered. */
static bool srv_read_body(srv *s, srv_conn *k) {
    srv_call *c = k->call;
    size_t before = c->body.n;
    ptrdiff_t used = http_body_read(&k->body, str_sub(buf_view(&k->in), k->in_at, k->in.n), &c->body);
    s->body_bytes += (long long)(c->body.n - before);
    if (used < 0) {
        srv_answer_last(s, k, (int)-used, -used == 400 ? "the body's chunks are not well-formed" : srv_why((int)-used));
        return true;
    }
    k->in_at += (size_t)used;
    if (s->body_bytes > SRV_BODIES * MAX(s->o->max_body_bytes, SRV_PIECE_BYTES)) {
        srv_answer_last(s, k, 503, "too many bytes of requests are being received");
        return true;
    }
    bool whole = k->body.state == HTTP_BODY_DONE, upload = c->route == &srv_upload_route;
    if (!whole && !(upload && c->body.n >= SRV_PIECE_BYTES)) return false;
    srv_enter(s, k, whole ? SRV_BUSY : SRV_PIECE);
    c->upload_whole = whole, c->t_start = os_now();
    if (srv_dispatch(s, c)) srv_answer(s, k);
    return true;
}

/* Everything that the bytes at hand allow; sends what came of it. */
static void srv_advance(srv *s, srv_conn *k) {
    bool more = true;
    while (more && !k->closed) {
        more = false;
        if (k->state == SRV_HEAD && k->out.n - k->out_at < SRV_MAX_UNSENT && !k->file_left) more = srv_read_head(s, k);
        else if (k->state == SRV_BODY) more = srv_read_body(s, k);
    }
    if (k->in_at == k->in.n) buf_free(&k->in), k->in_at = 0;
    srv_send(s, k);
    if (!k->eof || k->closed) return;
    bool generating = k->call && k->call->route && k->call->route->work == srv_begin_api;
    if (k->state == SRV_BODY || k->state == SRV_PIECE || k->state == SRV_LINGER || generating) srv_close(s, k);
    else if (k->state == SRV_HEAD && srv_unsent(k)) k->state = SRV_LAST;
    else if (k->state == SRV_HEAD) srv_close(s, k);
}

static void srv_receive(srv *s, srv_conn *k) {
    srv_loop *l = s->loop;
    for (int round = 0; round < 4; round++) {
        if (k->state != SRV_LINGER && k->in.n - k->in_at >= SRV_READ_BYTES) break;
        ssize_t n = recv(k->fd, l->scratch, SRV_READ_BYTES, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0) {
            srv_close(s, k);
            return;
        }
        k->eof = !n;
        if (k->state == SRV_LINGER) {
            if (!n || (k->lingered += n) > SRV_LINGER_BYTES) srv_close(s, k);
        } else {
            if (k->in_at) memmove(k->in.p, k->in.p + k->in_at, k->in.n - k->in_at), k->in.n -= k->in_at, k->in_at = 0;
            buf_put(&k->in, l->scratch, (size_t)n);
            srv_advance(s, k);
        }
        if (k->closed || n < SRV_READ_BYTES) return;
    }
}

static void srv_on_socket(srv *s, srv_conn *k, unsigned events) {
    if (k->closed) return;
    if (events & (EPOLLERR | EPOLLHUP)) srv_close(s, k);
    if (!k->closed && events & EPOLLOUT) srv_advance(s, k);
    if (!k->closed && events & (EPOLLIN | EPOLLRDHUP)) {
        bool full = k->state != SRV_LINGER && k->in.n - k->in_at >= SRV_READ_BYTES;
        if (full && events & EPOLLRDHUP) srv_close(s, k); /* gone, with more requests than will be looked at */
        else srv_receive(s, k);
    }
    srv_want(s, k);
}

/* ---- What workers made ---- */

static void srv_take(srv *s, srv_call *c) {
    pthread_mutex_lock(&s->lock);
    buf made = c->out;
    c->out = (buf){0};
    bool done = c->done, piece = c->want_piece, overflow = c->overflow;
    c->in_dirty = c->want_piece = false;
    pthread_mutex_unlock(&s->lock);
    srv_conn *k = c->conn;
    if (k && made.n) srv_append(k, &made);
    buf_free(&made);
    if (k && overflow) {
        srv_close(s, k);
    } else if (k) {
        if (done) srv_end_call(s, k);
        if (piece) srv_enter(s, k, SRV_BODY);
        srv_advance(s, k);
        srv_want(s, k);
    }
    pthread_mutex_lock(&s->lock);
    bool last = srv_unref(c, 1);
    pthread_mutex_unlock(&s->lock);
    if (last) srv_call_free(c);
}

static void srv_take_all(srv *s) {
    uint64_t n;
    ssize_t unused = read(s->wake_fd, &n, 8);
    (void)unused;
    pthread_mutex_lock(&s->lock);
    srv_call *c = s->dirty;
    s->dirty = NULL, s->woken = false;
    pthread_mutex_unlock(&s->lock);
    for (srv_call *next; c; c = next) next = c->next_dirty, srv_take(s, c);
}

/* ---- Listening ---- */

static void srv_set_accepting(srv *s, bool on) {
    srv_loop *l = s->loop;
    if (on == l->accepting) return;
    l->accepting = on;
    for (int i = 0; i < l->n_listeners; i++)
        epoll_ctl(l->epoll, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, l->listeners[i],
                  &(struct epoll_event){.events = EPOLLIN, .data.ptr = &l->listeners[i]});
}

/* No descriptor for one more connection: said once on standard error, and to the client if there is one for that. */
static void srv_full(srv *s, int fd) {
    srv_loop *l = s->loop;
    if (!l->said_full)
        fprintf(stderr, "toka: %d connections are open, all that the limit of open files (ulimit -n) allows; more get a 503\n",
                l->n_conns);
    l->said_full = true;
    if (fd < 0) {
        srv_set_accepting(s, false); /* until the next second */
        return;
    }
    buf b = {0}, body = {0};
    api_error(&body, 503, "all connections are taken", NULL, NULL, NULL);
    http_put_head(&b, 503, "application/json", (int64_t)body.n, false, (int64_t)time(NULL), STR("Retry-After: 1\r\n"));
    buf_str(&b, buf_view(&body));
    ssize_t unused = send(fd, b.p, b.n, MSG_NOSIGNAL);
    (void)unused;
    close(fd);
    buf_free(&b), buf_free(&body);
}

static void srv_accept(srv *s, int listener) {
    srv_loop *l = s->loop;
    for (int i = 0; i < SRV_EVENTS; i++) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)) srv_full(s, -1);
        if (fd < 0) return;
        if (l->n_conns >= l->max_conns) {
            srv_full(s, fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int)); /* fails on unix sockets, which have no delay */
        srv_conn *k = mem_zalloc(sizeof *k);
        *k = (srv_conn){.fd = fd, .events = EPOLLIN | EPOLLRDHUP, .t_state = l->now, .next = l->conns};
        srv_set_deadline(s, k);
        if (l->conns) l->conns->before = k;
        l->conns = k, l->n_conns++;
        if (epoll_ctl(l->epoll, EPOLL_CTL_ADD, fd, &(struct epoll_event){.events = k->events, .data.ptr = k})) srv_close(s, k);
    }
}

static int srv_listen_unix(srv *s, const char *path, toka_err *e) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    struct stat st;
    if (strlen(path) >= sizeof a.sun_path)
        return fail(e, TOKA_E_USE, "--uds %s: longer than %zu bytes", path, sizeof a.sun_path - 1);
    strcpy(a.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return fail(e, TOKA_E_IO, "--uds %s: %s", path, strerror(errno));
    if (lstat(path, &st) == 0 && S_ISSOCK(st.st_mode)) { /* left by a server that was killed, or in use */
        if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0) {
            close(fd);
            return fail(e, TOKA_E_USE, "--uds %s: another server listens there", path);
        }
        if (errno == ECONNREFUSED) unlink(path);
    }
    if (bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 4096)) {
        int code = fail(e, TOKA_E_IO, "--uds %s: %s", path, strerror(errno));
        close(fd);
        return code;
    }
    s->loop->listeners[s->loop->n_listeners++] = fd;
    fprintf(stderr, "toka: listening on unix:%s\n", path);
    return 0;
}

/* One address. port: in, and out where it was 0. */
static int srv_listen_one(srv *s, const struct addrinfo *a, int *port, toka_err *e) {
    struct sockaddr_storage got;
    socklen_t n = sizeof got;
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return fail(e, TOKA_E_IO, "--host %s: %s", s->o->host, strerror(errno));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    if (a->ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &(int){1}, sizeof(int));
    if (bind(fd, a->ai_addr, a->ai_addrlen) || listen(fd, 4096) || getsockname(fd, (struct sockaddr *)&got, &n)) {
        int code = fail(e, TOKA_E_IO, "cannot listen on %s port %d: %s", s->o->host, *port, strerror(errno));
        close(fd);
        return code;
    }
    bool six = got.ss_family == AF_INET6;
    *port = ntohs(six ? ((struct sockaddr_in6 *)&got)->sin6_port : ((struct sockaddr_in *)&got)->sin_port);
    s->loop->listeners[s->loop->n_listeners++] = fd;
    char host[64];
    getnameinfo((struct sockaddr *)&got, n, host, sizeof host, NULL, 0, NI_NUMERICHOST);
    fprintf(stderr, "toka: listening on http://%s%s%s:%d\n", six ? "[" : "", host, six ? "]" : "", *port);
    return 0;
}

static int srv_listen(srv *s, toka_err *e) {
    struct addrinfo *all = NULL;
    char service[16];
    int port = s->o->port, code = 0;
    if (s->o->uds) return srv_listen_unix(s, s->o->uds, e);
    snprintf(service, sizeof service, "%d", port);
    int bad = getaddrinfo(s->o->host, service, &(struct addrinfo){.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, &all);
    if (bad) return fail(e, TOKA_E_USE, "--host %s: %s", s->o->host, gai_strerror(bad));
    for (struct addrinfo *a = all; a && s->loop->n_listeners < SRV_MAX_LISTENERS; a = a->ai_next) {
        if (a->ai_family == AF_INET) ((struct sockaddr_in *)a->ai_addr)->sin_port = htons((uint16_t)port);
        if (a->ai_family == AF_INET6) ((struct sockaddr_in6 *)a->ai_addr)->sin6_port = htons((uint16_t)port);
        int failed = srv_listen_one(s, a, &port, e);
        if (failed) code = failed;
    }
    freeaddrinfo(all);
    return s->loop->n_listeners ? 0 : code; /* a name with an address of a kind this machine lacks is served on the others */
}

/* Descriptors are raised to the hard limit; what is left after the spare ones is for connections. */
static int srv_limit_files(srv_loop *l, toka_err *e) {
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r)) return fail(e, TOKA_E_IO, "the limit of open files: %s", strerror(errno));
    r.rlim_cur = r.rlim_max == RLIM_INFINITY ? 1 << 20 : r.rlim_max;
    setrlimit(RLIMIT_NOFILE, &r);
    getrlimit(RLIMIT_NOFILE, &r);
    if (r.rlim_cur < 2 * SRV_SPARE_FDS)
        return fail(e, TOKA_E_USE, "the limit of open files (ulimit -n) is %lld, expected at least %d", (long long)r.rlim_cur,
                    2 * SRV_SPARE_FDS);
    l->max_conns = (int)MIN(r.rlim_cur, (rlim_t)1 << 20) - SRV_SPARE_FDS;
    return 0;
}

/* ---- Time ---- */

static void srv_expire(srv *s, srv_conn *k) {
    bool begun = (k->state == SRV_HEAD && k->in_seen) || k->state == SRV_BODY;
    if (!begun || k->sending) {
        srv_close(s, k);
        return;
    }
    srv_answer_last(s, k, 408, "the request did not arrive in time; see --read-timeout");
    srv_advance(s, k);
    srv_want(s, k);
}

/* Once a second: deadlines; while draining, connections that wait for a next request. */
static void srv_check_deadlines(srv *s) {
    srv_loop *l = s->loop;
    for (srv_conn *k = l->conns, *next; k; k = next) {
        next = k->next;
        bool idle = k->state == SRV_HEAD && !srv_unsent(k);
        if (s->draining && idle) srv_close(s, k);
        else if (k->deadline && l->now > k->deadline) srv_expire(s, k);
    }
}

/* The engine's heartbeat: steps are made while there is work. */
static void srv_check_engine(srv *s, const toka_stats *t) {
    srv_loop *l = s->loop;
    if (!l->t_step || t->steps != l->last_steps || !(t->running + t->waiting)) l->last_steps = t->steps, l->t_step = l->now;
    s->wedged = l->now - l->t_step > s->o->step_timeout;
}

/* What the engine did since the last line; nothing if it did nothing. */
static void srv_status_line(srv *s, const toka_stats *t) {
    srv_loop *l = s->loop;
    const toka_stats *was = &l->last;
    double dt = l->now - l->t_status, out = (double)(t->output_tokens - was->output_tokens), rows = (double)(t->rows - was->rows);
    double prompt = (double)(t->prompt_tokens - was->prompt_tokens), pairs = (double)(t->attended - was->attended);
    double hits = (double)(t->prompt_tokens_shared - was->prompt_tokens_shared);
    double shared = (double)(t->attended_shared - was->attended_shared);
    if (!s->o->quiet && (rows > 0 || t->running || t->waiting))
        fprintf(stderr, "prefill %.0f tok/s, decode %.0f tok/s, running %d, waiting %d, KV %.1f%%, prefix hits %.1f%%, "
                "shared %.1f%%, connections %d\n", MAX(rows - out, 0) / dt, out / dt, t->running, t->waiting,
                t->kv_pages ? 100.0 * t->kv_pages_used / t->kv_pages : 0, prompt > 0 ? 100 * hits / prompt : 0,
                pairs > 0 ? 100 * shared / pairs : 0, l->n_conns);
    l->t_status = l->now, l->last = *t;
}

static void srv_tick(srv *s) {
    srv_loop *l = s->loop;
    if (l->now - l->t_second < 1) return;
    l->t_second = l->now;
    srv_check_deadlines(s);
    if (!s->draining) srv_set_accepting(s, true);
    if (s->phase != SRV_READY) return;
    toka_stats t = toka_get_stats(s->t);
    srv_check_engine(s, &t);
    if (l->now - l->t_status >= 5) srv_status_line(s, &t);
}

/* ---- The loop ---- */

static void srv_start_draining(srv *s) {
    srv_loop *l = s->loop;
    srv_set_accepting(s, false);
    for (int i = 0; i < l->n_listeners; i++) close(l->listeners[i]);
    l->n_listeners = 0;
    if (s->o->uds) unlink(s->o->uds);
    s->draining = true;
    l->t_second = 0;
}

static void srv_round(srv *s, struct epoll_event *events) {
    srv_loop *l = s->loop;
    int n = epoll_wait(l->epoll, events, SRV_EVENTS, SRV_TICK_MS);
    l->now = os_now();
    for (int i = 0; i < n; i++) {
        void *p = events[i].data.ptr;
        int *listener = p;
        if (p == &s->wake_fd) srv_take_all(s);
        else if (listener >= l->listeners && listener < l->listeners + SRV_MAX_LISTENERS) srv_accept(s, *listener);
        else srv_on_socket(s, p, events[i].events);
    }
    srv_tick(s);
    srv_bury(l);
}

/* Until a signal and all answers are out, a second signal, or a failed engine. */
static void srv_run_loop(srv *s) {
    srv_loop *l = s->loop;
    struct epoll_event events[SRV_EVENTS];
    double t_failed = 0;
    bool served = false;
    for (;;) {
        srv_round(s, events);
        int signals = *s->o->interrupted;
        served |= s->phase == SRV_READY;
        if (s->phase == SRV_FAILED && !t_failed) t_failed = l->now;
        bool told = t_failed && (!served || l->now - t_failed > SRV_FAILED_S);
        if ((signals || told) && !s->draining) srv_start_draining(s);
        if (s->draining && (!l->conns || signals > 1 || (t_failed && l->now - t_failed > SRV_FAILED_LAST_S))) break;
    }
    while (l->conns) srv_close(s, l->conns);
    srv_bury(l);
}

/* ---- Start and end ---- */

static void srv_say_defaults(const srv *s) {
    const toka_sampling *p = &s->model.base.sampling;
    const mf_defaults *d = &s->t->files->defaults;
    bool any = d->has_temperature || d->has_do_sample || d->has_top_p || d->has_top_k || d->has_min_p ||
               d->has_repetition_penalty;
    if (!s->o->model_defaults || !any) return;
    fprintf(stderr, "toka: defaults from generation_config.json: temperature %g, top_p %g, top_k %d, min_p %g, "
            "repetition_penalty %g; --generation-config vllm leaves them out\n", (double)p->temperature, (double)p->top_p,
            p->top_k, (double)p->min_p, (double)p->repetition_penalty);
}

static void srv_init_model(srv *s) {
    const srv_options *o = s->o;
    s->info = toka_get_info(s->t);
    s->name = o->n_names ? o->names[0] : s->info.model_name;
    snprintf(s->fingerprint, sizeof s->fingerprint, "toka-%s-%s", TOKA_VERSION, s->t->engine->be->name);
    toka_request base = toka_request_default();
    if (o->model_defaults) toka_request_model_defaults(s->t, &base);
    s->model = (api_model){.t = s->t, .names = o->n_names ? o->names : &s->name, .n_names = MAX(1, o->n_names), .name = s->name,
                           .fingerprint = s->fingerprint, .base = base, .completion_tokens = 16,
                           .max_len = s->info.max_model_len, .max_choices = SRV_MAX_CHOICES, .now = o->now,
                           .limits = {128, (size_t)o->max_body_bytes}, .strict = o->strict, .live = true,
                           .unknown = srv_unknown, .user = s};
}

static int srv_load(srv *s, toka_err *e) {
    double t0 = os_now();
    int code = toka_open(&s->t, &s->o->open, e);
    if (code) return code;
    srv_init_model(s);
    fb_options fb = {.dir = s->o->files_dir, .t = s->t, .m = &s->model};
    if ((code = fb_open(&s->files, &fb, e))) return code;
    int64_t kv = (int64_t)s->t->engine->stats.kv_pages * s->t->shape.B;
    fprintf(stderr, "toka: %s on %s, loaded in %.1f s; KV cache %lld tokens, %.1f sequences of %d tokens\n", s->name,
            s->info.device, os_now() - t0, (long long)kv, (double)kv / s->info.max_model_len, s->info.max_model_len);
    srv_say_defaults(s);
    fprintf(stderr, "toka: files of batches: %s\n", fb_folder(s->files));
    return 0;
}

static void *srv_engine(void *arg) { /* opens the model, then drives it until toka_stop */
    srv *s = arg;
    pthread_setname_np(pthread_self(), "toka-engine"); /* the device's threads inherit it */
    int code = srv_load(s, &s->e);
    if (!code) {
        fprintf(stderr, "toka: ready\n");
        s->phase = SRV_READY;
        code = toka_run(s->t, true, &s->e);
    }
    if (code) s->phase = SRV_FAILED;
    return NULL;
}

static int srv_start_thread(pthread_t *t, void *(*fn)(void *), srv *s, toka_err *e) {
    return pthread_create(t, NULL, fn, s) ? fail(e, TOKA_E_IO, "cannot start a thread") : 0;
}

static int srv_open(srv *s, srv_loop *l, toka_err *e) {
    l->epoll = epoll_create1(EPOLL_CLOEXEC), s->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (l->epoll < 0 || s->wake_fd < 0) return fail(e, TOKA_E_IO, "epoll: %s", strerror(errno));
    int code = srv_limit_files(l, e);
    if (!code) code = srv_listen(s, e);
    if (code) return code;
    if (getrandom(s->random, sizeof s->random, 0) != sizeof s->random)
        return fail(e, TOKA_E_IO, "getrandom: %s", strerror(errno));
    epoll_ctl(l->epoll, EPOLL_CTL_ADD, s->wake_fd, &(struct epoll_event){.events = EPOLLIN, .data.ptr = &s->wake_fd});
    srv_set_accepting(s, true);
    return 0;
}

static void srv_free(srv *s, srv_loop *l) {
    for (int i = 0; i < l->n_listeners; i++) close(l->listeners[i]);
    if (l->epoll >= 0) close(l->epoll);
    if (s->wake_fd >= 0) close(s->wake_fd);
    pthread_mutex_destroy(&s->lock), pthread_cond_destroy(&s->work);
    buf_free(&s->unknown);
    free(l->scratch);
}

/* toka serve. Returns 0 after a signal, when all answers are out. */
static int srv_run(const srv_options *o, toka_err *e) {
    srv_loop l = {.scratch = mem_alloc(SRV_READ_BYTES), .now = os_now()};
    srv s = {.o = o, .loop = &l, .started = (int64_t)time(NULL), .ready_end = &s.ready};
    pthread_t engine, workers[64];
    int n_workers = 0;
    pthread_mutex_init(&s.lock, NULL), pthread_cond_init(&s.work, NULL);
    srv_metrics_init(&s.m);
    int code = srv_open(&s, &l, e);
    bool driven = !code && !(code = srv_start_thread(&engine, srv_engine, &s, e));
    for (int n = MIN(o->n_workers, COUNT(workers)); !code && n_workers < n; n_workers += !code)
        code = srv_start_thread(&workers[n_workers], srv_worker, &s, e);
    if (!code) srv_run_loop(&s);
    while (driven && s.phase == SRV_LOADING) usleep(10000); /* a second signal ends the program meanwhile */
    if (s.files) fb_close(s.files);
    if (s.t) toka_stop(s.t);
    if (driven) pthread_join(engine, NULL);
    pthread_mutex_lock(&s.lock);
    s.stopping = true;
    pthread_cond_broadcast(&s.work);
    pthread_mutex_unlock(&s.lock);
    for (int i = 0; i < n_workers; i++) pthread_join(workers[i], NULL);
    toka_close(s.t); /* calls that were given up get their last events here */
    if (!code && s.phase == SRV_FAILED) *e = s.e, code = e->code;
    srv_free(&s, &l);
    return code;
}

/* ===========================================================================
 * MARK: 27. Bench and plan [os]
 * What the engine is worth, without a server: run_bench_throughput times a dataset whose samples are forced to given lengths,
 * also on dummy weights; run_bench_plan (`toka bench plan`) times chapters 11 to 14 alone. plan_make is `toka plan`: what fits on
 * which GPUs, and what that could reach at best, by arithmetic alone.
 * =========================================================================== */

/* ---- Dummy weights: the shapes of a line of models.txt, filled with random numbers ---- */

typedef struct run_fill_part { /* elements from .. to of one matrix */
    uint16_t *p;
    int64_t from, to;
    uint64_t stream; /* which matrix */
    float scale;
} run_fill_part;

/* Uniform in (-scale, scale) as bf16, four from each number of a counter-based generator (splitmix64's mixing). */
static void *run_fill_random(void *user) {
    const run_fill_part *f = user;
    for (int64_t i = f->from; i < f->to; i += 4) {
        uint64_t z = (f->stream << 40) + (uint64_t)i / 4 * 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        for (int k = 0; k < 4 && i + k < f->to; k++, z >>= 16) {
            float x = ((float)(z & 0xFFFF) * 0x1p-15f - (1 - 0x1p-16f)) * f->scale;
            uint32_t bits;
            memcpy(&bits, &x, sizeof bits);
            f->p[i + k] = (uint16_t)(bits >> 16);
        }
    }
    return NULL;
}

/* One tensor at *at, which moves behind it. Norms are 1, biases 0; a matrix keeps the size of what goes through it. */
static void run_dummy_tensor(mf_model *m, const mf_slot *slot, void *base, char **at) {
    enum { MOST = 64 };
    int64_t n = mf_slot_size(slot, &m->config);
    uint16_t *p = (uint16_t *)(void *)*at;
    if (!n) return;
    int rows = mf_product(slot->rows, &m->shape), cols = mf_product(slot->cols, &m->shape);
    *(toka_tensor *)(void *)((char *)base + slot->field) = (toka_tensor){p, TOKA_BF16, rows, cols, cols};
    *at += ((size_t)n * sizeof *p + 63) & ~(size_t)63;
    if (*slot->rows) {
        run_fill_part part[MOST];
        pthread_t thread[MOST];
        int parts = n < 1 << 20 ? 1 : MIN(os_n_cores(), MOST), started = 1;
        int64_t each = (n / parts + 3) / 4 * 4;
        for (int i = 0; i < parts; i++)
            part[i] = (run_fill_part){p, each * i, i + 1 < parts ? each * (i + 1) : n, (uint64_t)(*at - m->maps[0].p) >> 6,
                                      sqrtf(3 / (float)cols)};
        while (started < parts && !pthread_create(&thread[started], NULL, run_fill_random, &part[started])) started++;
        for (int i = started; i < parts; i++) run_fill_random(&part[i]);
        run_fill_random(&part[0]);
        for (int i = 1; i < started; i++) pthread_join(thread[i], NULL);
    } else {
        for (int64_t i = 0; i < n && str_ends(str_c(slot->suffix), STR("norm.weight")); i++) p[i] = 0x3F80;
    }
}

static int run_dummy_weights(mf_model *m, toka_err *e) {
    int L = m->shape.L;
    size_t pad = (size_t)(COUNT(mf_layer_slots) * L + COUNT(mf_model_slots) + 1) * 64;
    m->n_parameters = mf_n_parameters(&m->config), m->weight_bytes = (size_t)m->n_parameters * 2;
    size_t bytes = m->weight_bytes + pad;
    char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED || (int64_t)bytes > os_ram_bytes())
        return fail(e, TOKA_E_MEMORY, "%s: %zu bytes of dummy weights do not fit", m->name, m->weight_bytes);
    m->maps = mem_alloc(sizeof *m->maps);
    m->maps[m->n_maps++] = (str){at, bytes};
    m->weights.layers = arena_zalloc(&m->a, (size_t)L * sizeof *m->weights.layers);
    for (int i = 0; i < COUNT(mf_model_slots); i++) run_dummy_tensor(m, &mf_model_slots[i], &m->weights, &at);
    for (int layer = 0; layer < L; layer++) {
        for (int i = 0; i < COUNT(mf_layer_slots); i++)
            run_dummy_tensor(m, &mf_layer_slots[i], &m->weights.layers[layer], &at);
        m->weights.layers[layer].window = m->config.window[layer];
    }
    run_dummy_tensor(m, &mf_lm_head_slot, &m->weights, &at);
    if (!m->weights.lm_head.rows) m->weights.lm_head = m->weights.embed;
    return 0;
}

/* The line of models.txt with this name or hub id, in `a`; NULL: there is none. */
static int run_find_known(const char *models_file, const char *model, arena *a, const mf_known **found, toka_err *e) {
    mf_known *known;
    int n, code = mf_models_open(models_file, a, &known, &n, e);
    *found = NULL;
    for (int i = 0; i < n && !code && !*found; i++)
        if (!strcasecmp(known[i].name, model) || !strcmp(known[i].hub_id, model)) *found = &known[i];
    return code;
}

/* A toka without any file: shapes of models.txt, random weights, no tokenizer. */
static int run_dummy_open(toka **out, const toka_options *o, toka_err *e) {
    const mf_known *found = NULL;
    int code = pub_check_options(o, e);
    if (code) return code;
    if (!o->model) return fail(e, TOKA_E_USE, "--dummy-weights needs -m NAME, a name of models.txt");
    toka *t = mem_zalloc(sizeof *t);
    mf_model *m = t->files = mem_zalloc(sizeof *m);
    m->tokenizer_json = m->tokenizer_config = m->chat_template = m->tool_template = STR("");
    m->bos_id = -1, m->defaults = mf_no_defaults;
    code = run_find_known(o->models_file, o->model, &m->a, &found, e);
    if (!code && !found) code = fail(e, TOKA_E_USE, "%s: not a name of models.txt, which --dummy-weights needs", o->model);
    if (!code) {
        m->name = found->name, m->config = found->config, m->shape = t->shape = found->config.shape;
        snprintf(m->architecture, sizeof m->architecture, "%s", m->config.arch->name);
        code = run_dummy_weights(m, e);
    }
    if (!code) code = eng_open(&t->engine, pub_backend(o->device), m, &t->shape, NULL, o, e);
    if (code) toka_close(t), t = NULL;
    *out = t;
    return code;
}

/* ---- toka bench throughput ---- */

typedef struct run_bench_options {
    const char *dataset; /* lines {"prompt_token_ids": [..] or "prompt": "..", "output_lengths": [l1, ..]} */
    int num_prompts;     /* of its lines, 0: all */
    toka_request base;
    bool json, quiet;
    atomic_int *interrupted;
} run_bench_options;

typedef struct run_bench_sample {
    int prompt, length;
} run_bench_sample;

/* Every sample is a request of its own length, end ids ignored; those of one line find each other's prompt in the prefix
 * tree. A sample that ends puts the next one in, so that the engine knows twice those that run at once. */
typedef struct run_bench_state {
    const run_bench_options *o;
    toka *t;
    ids tokens;                 /* of all prompts */
    size_t *prompt;             /* [n_prompts + 1] where each begins in tokens */
    run_bench_sample *sample;   /* [n_samples] in the order of the file */
    int64_t n_prompts, n_samples, cap_prompts, cap_samples;
    int64_t next, n_output;
    toka_err e;
} run_bench_state;

static int run_bench_line(run_bench_state *b, const json *root, int64_t number, toka_err *e) {
    const json *prompt = json_get(root, "prompt_token_ids"), *text = json_get(root, "prompt");
    const json *lengths = json_get(root, "output_lengths");
    if (b->n_prompts + 1 >= b->cap_prompts) {
        b->cap_prompts = MAX(1024, 2 * b->cap_prompts);
        b->prompt = mem_realloc(b->prompt, (size_t)b->cap_prompts * sizeof *b->prompt);
        b->prompt[b->n_prompts] = b->tokens.n;
    }
    size_t first = b->tokens.n;
    if (json_is(prompt, JSON_ARRAY)) {
        JSON_EACH(it, prompt) ids_push(&b->tokens, (int32_t)MAX(-1, MIN(json_int(it, -1), INT32_MAX)));
    } else if (json_is(text, JSON_STRING)) {
        if (pub_need_tokenizer(b->t, e) ||
            tok_encode(b->t->tok, json_str(text), TOKA_ADD_SPECIAL | TOKA_PARSE_SPECIAL, &b->tokens, e)) return e->code;
    }
    int64_t n = (int64_t)(b->tokens.n - first);
    if (!n || !json_is(lengths, JSON_ARRAY) || !lengths->n)
        return fail(e, TOKA_E_INPUT, "%s: line %lld: expected prompt_token_ids or prompt, and output_lengths",
                    b->o->dataset, (long long)number);
    JSON_EACH(it, lengths) {
        int64_t length = json_int(it, 0);
        if (length < 1 || n + length > b->t->shape.max_len)
            return fail(e, TOKA_E_INPUT, "%s: line %lld: a prompt of %lld tokens and an output of %lld, expected at least 1 "
                        "and at most %d in all", b->o->dataset, (long long)number, (long long)n, (long long)length,
                        b->t->shape.max_len);
        if (b->n_samples == b->cap_samples) {
            b->cap_samples = MAX(1024, 2 * b->cap_samples);
            b->sample = mem_realloc(b->sample, (size_t)b->cap_samples * sizeof *b->sample);
        }
        b->sample[b->n_samples++] = (run_bench_sample){(int)b->n_prompts, (int)length};
        b->n_output += length;
    }
    b->prompt[++b->n_prompts] = b->tokens.n;
    return 0;
}

static int run_bench_load(run_bench_state *b, toka_err *e) {
    run_input in;
    str line;
    int code = 0, most = b->o->num_prompts ? b->o->num_prompts : INT_MAX - 1;
    int fd = open(b->o->dataset, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return fail(e, TOKA_E_INPUT, "%s: %s", b->o->dataset, strerror(errno));
    run_input_init(&in, fd, b->o->dataset, b->o->interrupted);
    while (b->n_prompts < most && (code = run_next_line(&in, &line, NULL, e)) > 0) {
        arena a = {0};
        toka_err why;
        const json *root = run_is_blank(line) ? NULL : json_parse(&a, line, run_limits, &why);
        code = 0;
        if (root) code = run_bench_line(b, root, in.number, e);
        else if (!run_is_blank(line))
            code = fail(e, TOKA_E_INPUT, "%s: line %lld: %s", b->o->dataset, (long long)in.number, why.msg);
        arena_free(&a);
        if (code) break;
    }
    if (!code && !b->n_prompts) code = fail(e, TOKA_E_INPUT, "%s: no lines", b->o->dataset);
    run_input_free(&in);
    close(fd);
    return code;
}

static int run_bench_event(void *user, const toka_event *ev);

static void run_bench_submit(run_bench_state *b) {
    if (b->next == b->n_samples || b->e.code) return;
    const run_bench_sample *s = &b->sample[b->next];
    int64_t id;
    toka_request q = b->o->base;
    q.ids = b->tokens.p + b->prompt[s->prompt], q.n_ids = b->prompt[s->prompt + 1] - b->prompt[s->prompt];
    q.sampling.seed = api_seed(q.sampling.seed, (uint64_t[]){0, (uint64_t)b->next++});
    q.sampling.max_tokens = s->length, q.sampling.ignore_eos = true;
    toka_submit(b->t, &q, run_bench_event, b, &id, &b->e);
}

static int run_bench_event(void *user, const toka_event *ev) {
    run_bench_state *b = user;
    if (*b->o->interrupted) return b->next = b->n_samples, 1;
    if (ev->finish != TOKA_RUNNING) run_bench_submit(b);
    return 0;
}

/* Names and lines as vLLM's `bench throughput`: a request is a line, its prompt counted once. */
static void run_bench_print(const run_bench_state *b, const run_report *p) {
    int64_t prompt = (int64_t)b->tokens.n, total = prompt + b->n_output;
    double s = p->elapsed_s;
    if (!b->o->json) {
        printf("Throughput: %.2f requests/s, %.2f total tokens/s, %.2f output tokens/s\n"
               "Total num prompt tokens:  %lld\nTotal num output tokens:  %lld\n", (double)b->n_prompts / s, (double)total / s,
               (double)b->n_output / s, (long long)prompt, (long long)b->n_output);
        return;
    }
    const struct { const char *name; double value; } numbers[] = {
        {"requests_per_second", (double)b->n_prompts / s}, {"tokens_per_second", (double)total / s},
        {"output_tokens_per_second", (double)b->n_output / s}, {"prefix_hit_share", p->shared},
        {"mean_batch_size", p->rows_per_step}, {"plan_share", p->plan}, {"run_share", p->run},
        {"commit_share", p->commit}, {"idle_share", p->idle}};
    const struct { const char *name; int64_t value; } counts[] = {
        {"num_requests", b->n_prompts}, {"num_samples", b->n_samples}, {"total_num_tokens", total},
        {"total_prompt_tokens", prompt}, {"total_output_tokens", b->n_output}, {"steps", p->s.steps},
        {"preemptions", p->s.preemptions}};
    buf out = {0};
    json_put_open(&out, '{');
    json_put_key(&out, "elapsed_time"), json_put_num(&out, s, false);
    for (int i = 0; i < COUNT(counts); i++) json_put_key(&out, counts[i].name), json_put_int(&out, counts[i].value);
    for (int i = 0; i < COUNT(numbers); i++) json_put_key(&out, numbers[i].name), json_put_num(&out, numbers[i].value, true);
    json_put_close(&out, '}');
    printf("%s\n", out.p);
    buf_free(&out);
}

static int run_bench_throughput(toka *t, const run_bench_options *o, toka_err *e) {
    run_bench_state b = {.o = o, .t = t};
    int code = run_bench_load(&b, e);
    if (!code) {
        double t0 = os_now();
        for (int i = 0; i < 2 * t->engine->max_seqs; i++) run_bench_submit(&b);
        code = toka_run(t, false, e);
        if (!code && b.e.code) *e = b.e, code = e->code;
        run_report p = run_report_make(t, os_now() - t0);
        if (!code && !*o->interrupted) run_bench_print(&b, &p);
        if (!code && !o->quiet) run_report_show(&p);
    }
    ids_free(&b.tokens);
    free(b.prompt), free(b.sample);
    return code;
}

/* ---- toka bench plan: what a step costs before any model runs ---- */

/* The monkeys shape: 128 prompts x 1,024 samples, 715-token prompts of which the first 600 tokens are shared by all,
 * outputs lognormal with mean 150, max_tokens 1,024, 8,192 sequences at once, results two steps late. The backend does
 * nothing. Times are CPU time of the one thread. */
enum { RUN_PLAN_LAG = 2, RUN_PLAN_PROMPTS = 128, RUN_PLAN_SAMPLES = 1024, RUN_PLAN_PROMPT = 715, RUN_PLAN_SHARED = 600,
       RUN_PLAN_MEAN = 150, RUN_PLAN_MAX = 1024, RUN_PLAN_SEQS = 8192, RUN_PLAN_START = 10, RUN_PLAN_STEPS = 1000 };

typedef struct run_plan_late { /* rows whose tokens are still on their way */
    batch_out *out; /* [RUN_PLAN_SEQS] */
    int n;
} run_plan_late;

typedef struct run_plan {
    sched s;
    batch b;
    batch_step built;
    run_plan_late late[RUN_PLAN_LAG];
    int *length;       /* [RUN_PLAN_SEQS] of the sequence in each slot, drawn when it starts */
    uint32_t *started; /* [RUN_PLAN_SEQS] ticket + 1 of that sequence */
    uint64_t rng;
    int64_t n_out, n_done;
    double plan_s, build_s, commit_s;
} run_plan;

typedef struct run_plan_case { /* what is measured, and what came of it */
    const char *name;
    int extra, n_pages; /* further requests of one sample queued behind; pages of 16 tokens */
    int steps;
    double ms, plan_ms, build_ms, commit_ms, p50, p99, bytes, most_bytes, running;
    double start_ms, start_bytes; /* most of one of the first RUN_PLAN_START steps, which fill the empty machine */
    int64_t n_preempted;
} run_plan_case;

static double run_cpu_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double run_plan_unit(run_plan *t) {
    t->rng ^= t->rng >> 12, t->rng ^= t->rng << 25, t->rng ^= t->rng >> 27;
    return (double)((t->rng * 0x2545F4914F6CDD1Du) >> 11) * 0x1p-53;
}

static int run_plan_length(run_plan *t) {
    double normal = sqrt(-2 * log(1 - run_plan_unit(t))) * cos(6.283185307179586 * run_plan_unit(t)), sigma = 0.7;
    double length = exp(log(RUN_PLAN_MEAN) - sigma * sigma / 2 + sigma * normal);
    return (int)MAX(1.0, MIN(length + 0.5, (double)RUN_PLAN_MAX));
}

static int run_plan_submit(run_plan *t, int prompt_no, int n, toka_err *e) {
    int32_t prompt[RUN_PLAN_PROMPT];
    for (int i = 0; i < RUN_PLAN_PROMPT; i++)
        prompt[i] = i < RUN_PLAN_SHARED ? 1000 + i : (prompt_no * 7919 + i * 31) % 100000;
    sched_job job = {.prompt = prompt, .n_prompt = RUN_PLAN_PROMPT, .n = n, .max_tokens = RUN_PLAN_MAX};
    return MIN(sched_submit(&t->s, &job, e), 0);
}

static void run_plan_step(run_plan *t, int step) {
    double t0 = run_cpu_now();
    sched_plan(&t->s);
    double t1 = run_cpu_now();
    batch_build(&t->b, &t->built, &t->s);
    double t2 = run_cpu_now();
    run_plan_late *l = &t->late[step % RUN_PLAN_LAG]; /* what was planned then comes back, the new takes its place */
    for (int i = 0; i < l->n; i++) {
        batch_out o = l->out[i];
        const sched_seq *x = &t->s.seqs[o.q];
        if (x->ticket != o.ticket) continue;
        if (t->started[o.q] != x->ticket + 1) t->started[o.q] = x->ticket + 1, t->length[o.q] = run_plan_length(t);
        int n = x->n_known - x->n_prompt + 1;
        int32_t token = (int32_t)((t->rng + (uint64_t)o.q * 0x9E3779B9u + (uint64_t)n) % 100000);
        t->n_out++;
        t->n_done += sched_commit(&t->s, o.q, o.ticket, token, n >= t->length[o.q]) == SCHED_DONE;
    }
    l->n = t->built.n_out;
    memcpy(l->out, t->built.outs, (size_t)l->n * sizeof *l->out);
    t->plan_s += t1 - t0, t->build_s += t2 - t1, t->commit_s += run_cpu_now() - t2;
}

static int run_plan_open(run_plan *t, int n_pages, toka_err *e) {
    *t = (run_plan){.rng = 12345};
    sched_config c = {.B = 16, .n_pages = n_pages, .max_seqs = RUN_PLAN_SEQS, .max_tokens = 32768, .max_len = 2048, .n_classes = 1024};
    int code = sched_init(&t->s, &c, e);
    if (!code) code = batch_init(&t->b, &t->s, (batch_cost){.merge_tok = 4, .span_tok = 64, .tile_rows = 64}, e);
    if (!code) code = batch_step_init(&t->built, &t->s, e);
    t->length = mem_zalloc(RUN_PLAN_SEQS * sizeof(int)), t->started = mem_zalloc(RUN_PLAN_SEQS * sizeof(uint32_t));
    for (int i = 0; i < RUN_PLAN_LAG; i++) t->late[i].out = mem_alloc(RUN_PLAN_SEQS * sizeof(batch_out));
    return code;
}

static void run_plan_close(run_plan *t) {
    for (int i = 0; i < RUN_PLAN_LAG; i++) free(t->late[i].out);
    free(t->length), free(t->started);
    batch_step_free(&t->built), batch_free(&t->b), sched_free(&t->s);
}

static int run_compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int run_plan_measure(run_plan_case *c, atomic_int *interrupted, toka_err *e) {
    run_plan t;
    int n = 0;
    double *ms = mem_alloc(RUN_PLAN_STEPS * sizeof *ms);
    int code = run_plan_open(&t, c->n_pages, e);
    for (int i = 0; i < RUN_PLAN_PROMPTS && !code; i++) code = run_plan_submit(&t, i, RUN_PLAN_SAMPLES, e);
    for (int i = 0; i < c->extra && !code; i++) code = run_plan_submit(&t, RUN_PLAN_PROMPTS + i, 1, e);
    for (int i = 0; i < RUN_PLAN_START + RUN_PLAN_STEPS && t.s.n_waiting && !code && !*interrupted; i++) {
        if (i == RUN_PLAN_START) t.plan_s = t.build_s = t.commit_s = 0;
        double t0 = run_cpu_now();
        run_plan_step(&t, i);
        double took = (run_cpu_now() - t0) * 1e3, bytes = (double)batch_upload_bytes(&t.b.up);
        if (i < RUN_PLAN_START) {
            c->start_ms = MAX(c->start_ms, took), c->start_bytes = MAX(c->start_bytes, bytes);
            continue;
        }
        ms[n++] = took, c->ms += took, c->bytes += bytes, c->running += t.s.n_running;
        c->most_bytes = MAX(c->most_bytes, bytes);
    }
    qsort(ms, (size_t)n, sizeof *ms, run_compare_doubles);
    c->steps = n, c->n_preempted = t.s.n_preempted;
    if (n) {
        c->ms /= n, c->bytes /= n, c->running /= n, c->p50 = ms[n / 2], c->p99 = ms[n * 99 / 100];
        c->plan_ms = t.plan_s * 1e3 / n, c->build_ms = t.build_s * 1e3 / n, c->commit_ms = t.commit_s * 1e3 / n;
    }
    free(ms);
    run_plan_close(&t);
    return code;
}

static void run_plan_json(buf *b, const run_plan_case *c) {
    const struct { const char *name; double value; } numbers[] = {
        {"ms_per_step", c->ms}, {"plan_ms", c->plan_ms}, {"build_ms", c->build_ms}, {"commit_ms", c->commit_ms},
        {"p50_ms", c->p50}, {"p99_ms", c->p99}, {"upload_bytes_per_step", c->bytes}, {"most_upload_bytes", c->most_bytes},
        {"mean_running", c->running}, {"most_start_ms", c->start_ms}, {"most_start_bytes", c->start_bytes}};
    for (int i = 0; i < COUNT(numbers); i++) json_put_key(b, numbers[i].name), json_put_num(b, numbers[i].value, true);
    json_put_key(b, "steps"), json_put_int(b, c->steps);
    json_put_key(b, "preemptions"), json_put_int(b, c->n_preempted);
}

/* The figures of the first case at the top of the JSON object, all cases below. */
static int run_bench_plan(bool as_json, atomic_int *interrupted, toka_err *e) {
    run_plan_case cases[] = {{.name = "8,192 running", .n_pages = 1572864 / 16},
                             {.name = "65,536 more requests queued", .extra = 65536, .n_pages = 1572864 / 16},
                             {.name = "half the KV cache, always full", .n_pages = 1572864 / 32}};
    buf b = {0};
    json_put_open(&b, '{');
    for (int i = 0; i < COUNT(cases) && !*interrupted; i++) {
        run_plan_case *c = &cases[i];
        int code = run_plan_measure(c, interrupted, e);
        if (code) return buf_free(&b), code;
        if (!i) run_plan_json(&b, c), json_put_key(&b, "cases"), json_put_open(&b, '[');
        json_put_open(&b, '{');
        json_put_key(&b, "name"), json_put_str(&b, str_c(c->name));
        run_plan_json(&b, c);
        json_put_close(&b, '}');
        if (as_json) continue;
        printf("%s: %.3f ms a step (plan %.3f, build %.3f, commit %.3f; p50 %.3f, p99 %.3f), %.0f bytes up (most %.0f)\n",
               c->name, c->ms, c->plan_ms, c->build_ms, c->commit_ms, c->p50, c->p99, c->bytes, c->most_bytes);
        printf("  %d steps, %.0f sequences running, %lld preemptions; before that %d steps from empty to full, at most %.1f ms and "
               "%.0f bytes\n", c->steps, c->running, (long long)c->n_preempted, RUN_PLAN_START, c->start_ms, c->start_bytes);
        fflush(stdout);
    }
    json_put_close(&b, ']'), json_put_close(&b, '}');
    if (as_json && !*interrupted) printf("%s\n", b.p);
    buf_free(&b);
    return 0;
}

enum { RUN_PEAK_TFLOPS = 790 }; /* bf16, what an H100 or H200 sustains within its power limit (8192 cubed, random numbers) */

/* ---- toka plan: what of a model fits on which split of how many GPUs, and what that could reach at best ----
 *
 * A split tp x pp x dp: dp replicas, each of pp stages that hold some of the layers, each stage of tp ranks that hold a part of
 * every layer. Memory is counted by the GPU backend's own formulas (toka.h). Time is a roofline: the ops of a step follow one
 * another, and each takes the longer of its arithmetic at the GPU's rate and its bytes at the GPU's bandwidth.
 *
 *     matrix products  2 FLOP a row and parameter; the rank's parameters are read once
 *     attention        4 H D FLOP a row and position it sees; K and V of own tokens are read once a row, those of a prompt once
 *                      for all samples of it that run
 *     all-reduce       2 (tp-1)/tp of rows*E*2 bytes over the link, twice a layer and once behind the embedding
 *     stages           the sequences of a replica go round in pp micro-batches; a stage takes the longer of its work and of
 *                      sending rows*E*2 bytes on, and the slowest stage is waited for
 *
 * Each message costs PLAN_LATENCY beside. With that and 300 GB/s the ten all-reduces that were timed on 2 and 8 H200 (NCCL 2.28,
 * NVLS off, 1 to 134 MB) come out within 20 %. What keeps a real run below: no op meets its roofline, host time and bubbles are
 * left out, and lengths vary. What could lift it above: communication that overlaps with products. */

enum { PLAN_MOST_GPUS = 128 };
#define PLAN_LATENCY 40e-6         /* seconds of one all-reduce or send */
#define PLAN_CONTEXT_BYTES 0x1p29  /* of a GPU's memory that are gone before the program asks what is free */

typedef struct plan_gpu {
    const char *name;
    int arch;            /* compute capability times ten */
    double memory;       /* bytes that the driver gives out in all */
    double flops;        /* per second: dense bf16 products, float32 sums */
    double read;         /* bytes per second */
    double link;         /* bytes per second from one GPU of a host to another, one way */
    const char *source;  /* of the last three */
} plan_gpu;

/* Measured rates are of the datasheet's 0.80 (products: the power limit), 0.85 and 0.93 (reads), 0.67 (link). */
static const plan_gpu plan_gpus[] = {
    {"B200", 100, 178.3 * 0x1p30, 2250e12, 8.00e12, 900e9, "datasheet"},
    {"H200", 90, 139.8 * 0x1p30, RUN_PEAK_TFLOPS * 1e12, 4.10e12, 300e9, "measured"},
    {"H100", 90, 79.1 * 0x1p30, RUN_PEAK_TFLOPS * 1e12, 3.11e12, 300e9, "measured, the link on H200s"},
    {"A100-80G", 80, 79.1 * 0x1p30, 312e12, 2.04e12, 300e9, "datasheet"},
    {"A100-40G", 80, 39.4 * 0x1p30, 312e12, 1.56e12, 300e9, "datasheet"},
    {"L40S", 89, 44.4 * 0x1p30, 362e12, 0.86e12, 32e9, "datasheet"},
    {"L4", 89, 22.0 * 0x1p30, 121e12, 0.30e12, 32e9, "datasheet"},
    {"A10", 86, 22.0 * 0x1p30, 125e12, 0.60e12, 32e9, "datasheet"},
    {"RTX-4090", 89, 23.6 * 0x1p30, 165e12, 1.01e12, 32e9, "datasheet"},
    {"RTX-3090", 86, 23.6 * 0x1p30, 71e12, 0.94e12, 32e9, "datasheet"},
};

typedef struct plan_ask { /* what is asked; all checked by plan_check */
    const mf_config *model;
    const plan_gpu *gpu;
    int gpus;
    double utilization;
    int max_len, max_seqs, max_tokens; /* of a sequence, of a replica, of a step */
    int input, output, samples;        /* the workload: lengths of prompt and answer, answers to a prompt */
} plan_ask;

typedef struct plan_rank { /* one GPU of a replica */
    toka_shape shape; /* its own part: H, K, F, V, L */
    int l0;           /* its first layer */
    bool first, last; /* stage: has the embedding; has the LM head */
    int64_t weights, scratch, token_bytes; /* bytes; token_bytes: K and V of one token */
    int64_t kv_tokens;                     /* that it has room for; less than 1: none */
} plan_rank;

typedef struct plan_load { /* of one step of one micro-batch, on average: so counts are fractions */
    double rows;    /* through the layers */
    double outputs; /* of these, those that draw a token */
    double prompts; /* that are computed */
} plan_load;

typedef struct plan_time { /* seconds of one rank in one step, by what they go to; send overlaps the rest */
    double weights, kv, tensor, link, send;
} plan_time;

typedef struct plan_rate { /* of all replicas */
    int64_t running;       /* sequences */
    double step_s, output, total; /* a step of every sequence; tokens per second drawn; and with those of prompts */
    const char *bound;
} plan_rate;

typedef struct plan_split {
    int tp, pp, dp;
    bool fits;
    int64_t weights, scratch, token_bytes; /* bytes, each of the rank that has most */
    int64_t kv_tokens;                     /* of all replicas */
    double at_len;                         /* sequences of the longest length that these hold */
    plan_rate decode, work;
} plan_split;

/* ---- What a rank has ---- */

/* Layers' worth of the LM head: its products over those of a layer. */
static double plan_head_cost(const toka_shape *s) {
    double E = s->E, layer = E * (s->H + 2.0 * s->K) * s->D + (double)s->H * s->D * E + 3 * E * s->F;
    return E * s->V / layer;
}

/* The layers of one stage, so that the slowest stage is as fast as can be: the last has the LM head beside, the embedding costs
 * nothing. Every stage has at least one. */
static void plan_stage(const toka_shape *s, int pp, int stage, int *l0, int *n) {
    double head = plan_head_cost(s), best = INFINITY;
    int last = s->L, others = pp - 1;
    for (int k = 1; k <= s->L - others && others; k++) {
        double slowest = MAX(k + head, ceil((double)(s->L - k) / others));
        if (slowest <= best) best = slowest, last = k;
    }
    int rest = s->L - last;
    *l0 = stage < others ? (int)((int64_t)rest * stage / others) : rest;
    *n = stage < others ? (int)((int64_t)rest * (stage + 1) / others) - *l0 : last;
}

/* Can the model be cut into so many ranks a stage, and so many stages? Kv heads are dealt out whole; where there are fewer than
 * ranks, each is held by several, which share its query heads. */
static int plan_check_split(const toka_shape *s, int tp, int pp, toka_err *e) {
    if (pp > s->L) return fail(e, TOKA_E_USE, "pp %d: the model has %d layers", pp, s->L);
    if (tp > s->F || tp > s->V) return fail(e, TOKA_E_USE, "tp %d: the MLP is %d wide, the vocabulary %d", tp, s->F, s->V);
    if (tp <= s->K || (tp % s->K == 0 && s->H / s->K % (tp / s->K) == 0)) return 0;
    return fail(e, TOKA_E_USE, "tp %d: the model has %d query heads and %d kv heads, which cannot be dealt out", tp, s->H, s->K);
}

static int plan_part(int n, int r, int tp) { return (int)((int64_t)n * (r + 1) / tp - (int64_t)n * r / tp); }

/* The sizes of one layer's tensors; no data. */
static toka_layer plan_layer(const mf_config *c, const toka_shape *s) {
    toka_layer layer = {0};
    for (int i = 0; i < COUNT(mf_layer_slots); i++) {
        const mf_slot *slot = &mf_layer_slots[i];
        if (slot->needs & ~c->features) continue;
        toka_tensor *t = (toka_tensor *)(void *)((char *)&layer + slot->field);
        t->rows = mf_product(slot->rows, s), t->cols = mf_product(slot->cols, s);
    }
    return layer;
}

/* Rank r of tp in stage `stage` of pp; the split passes plan_check_split. */
static plan_rank plan_rank_of(const plan_ask *a, int tp, int pp, int stage, int r) {
    const toka_shape *all = &a->model->shape;
    plan_rank p = {.shape = *all, .first = !stage, .last = stage == pp - 1};
    toka_shape *s = &p.shape;
    plan_stage(all, pp, stage, &p.l0, &s->L);
    s->K = tp <= all->K ? plan_part(all->K, r, tp) : 1;
    s->H = tp <= all->K ? all->H / all->K * s->K : all->H / tp;
    s->F = plan_part(all->F, r, tp), s->V = plan_part(all->V, r, tp);
    toka_layer layer = plan_layer(a->model, s);
    toka_tensor head = {.rows = s->V, .cols = s->E};
    bool tied = !(a->model->features & MF_LM_HEAD);
    int heads = p.first + p.last - (p.first && p.last && tied); /* embedding and LM head; tied they are one where they meet */
    p.weights = (int64_t)toka_gpu_layer_bytes(&layer) * s->L + (int64_t)toka_gpu_matrix_bytes(&head) * heads;
    p.scratch = (int64_t)toka_gpu_scratch_bytes(s, a->max_tokens); /* at the model's own length, as eng_open asks for it */
    p.token_bytes = (int64_t)2 * s->L * s->K * s->D * 2;
    int64_t room = (int64_t)(a->utilization * (a->gpu->memory - PLAN_CONTEXT_BYTES)) - p.weights - p.scratch;
    p.kv_tokens = MIN((int64_t)a->max_seqs * a->max_len, room / p.token_bytes);
    return p;
}

/* ---- How long it takes ---- */

/* Seconds until every one of tp ranks has the sum of their messages; of sending one on to the next stage. */
static double plan_reduce(const plan_gpu *g, int tp, double bytes) {
    return PLAN_LATENCY + 2.0 * (tp - 1) / tp * bytes / g->link;
}
static double plan_send(const plan_gpu *g, double bytes) { return PLAN_LATENCY + bytes / g->link; }

/* An op that does so much arithmetic on so many bytes: its seconds go to the tensor cores or to *memory, whichever is longer. */
static void plan_op(const plan_gpu *g, double flop, double bytes, plan_time *t, double *memory) {
    double arithmetic = flop / g->flops, reading = bytes / g->read;
    *(arithmetic > reading ? &t->tensor : memory) += MAX(arithmetic, reading);
}

/* Attention of one layer. A row that draws sees on average half of its answer, and the prompt; a window cuts off what is far. */
static void plan_attention(const plan_ask *a, const plan_rank *p, const plan_load *l, double window, plan_time *t) {
    double prompt = a->input, own = a->output / 2.0, pairs = prompt * prompt / 2, running = ceil(l->outputs / a->samples);
    if (window > 0) {
        if (window < prompt) pairs = window * prompt - window * window / 2;
        own = MIN(own, window), prompt = MIN(prompt, window - own);
    }
    double flop = 4.0 * p->shape.H * p->shape.D, bytes = 4.0 * p->shape.K * p->shape.D;
    plan_op(a->gpu, flop * l->outputs * own, bytes * l->outputs * own, t, &t->kv);
    plan_op(a->gpu, flop * l->outputs * prompt, bytes * running * prompt, t, &t->kv);
    plan_op(a->gpu, flop * l->prompts * pairs, bytes * l->prompts * a->input, t, &t->kv);
}

static plan_time plan_rank_time(const plan_ask *a, const plan_rank *p, int tp, const plan_load *l) {
    const plan_gpu *g = a->gpu;
    plan_time t = {0};
    toka_layer layer = plan_layer(a->model, &p->shape);
    double layers = (double)toka_gpu_layer_bytes(&layer) * p->shape.L, head = p->last ? 2.0 * p->shape.V * p->shape.E : 0;
    plan_op(g, l->rows * layers, layers, &t, &t.weights); /* bf16: as many bytes as FLOP of a row */
    plan_op(g, l->outputs * head, head, &t, &t.weights);
    for (int i = p->l0; i < p->l0 + p->shape.L; i++) plan_attention(a, p, l, a->model->window[i], &t);
    double message = l->rows * p->shape.E * 2;
    if (tp > 1) t.link = (2 * p->shape.L + p->first) * plan_reduce(g, tp, message);
    if (!p->last) t.send = plan_send(g, message);
    return t;
}

static double plan_work(const plan_time *t) { return t->weights + t->kv + t->tensor + t->link; }
static double plan_seconds(const plan_time *t) { return MAX(plan_work(t), t->send); }

/* What most of the time goes to. Weights that more sequences would share are the KV cache's fault, where it keeps those out. */
static const char *plan_bound(const plan_time *t, bool kv_full) {
    double most = MAX(MAX(t->weights, t->kv), MAX(t->tensor, t->link));
    if (t->link == most || t->send > plan_work(t)) return "link";
    if (t->tensor == most) return "tensor cores";
    return t->kv == most ? "HBM, KV" : kv_full ? "KV capacity" : "HBM, weights";
}

/* Sequences that a replica keeps running: as many as KV tokens (full pages of a prompt are shared by its samples, of each answer
 * half is there), the cap on sequences and the rows of a step allow. rows: a sequence's in a step, prompts included. */
static int64_t plan_running(const plan_ask *a, int pp, int64_t kv_tokens, double rows, bool *kv_full) {
    double shared = a->input / TOKA_GPU_PAGE_TOK * TOKA_GPU_PAGE_TOK;
    double each = shared / a->samples + (a->input - shared) + a->output / 2.0 + TOKA_GPU_PAGE_TOK / 2.0;
    double most = MIN((double)a->max_seqs, (double)a->max_tokens * pp / rows), fit = (double)kv_tokens / each;
    *kv_full = fit < most;
    return (int64_t)MAX(MIN(most, fit), 1.0);
}

/* prompts: with the prompts of sequences that take the places of those that ended, or decode alone. */
static plan_rate plan_rate_of(const plan_ask *a, const plan_rank *ranks, const plan_split *s, bool prompts) {
    bool kv_full;
    double more = prompts ? (a->input - 1.0) / ((double)a->samples * a->output) : 0; /* rows of prompts for each row that draws */
    int64_t n = plan_running(a, s->pp, s->kv_tokens / s->dp, 1 + more, &kv_full);
    double part = (double)n / (double)MIN(n, (int64_t)s->pp); /* sequences of a micro-batch */
    plan_load load = {part * (1 + more), part, prompts ? part / ((double)a->samples * a->output) : 0};
    plan_time slowest = {0};
    for (int i = 0; i < s->tp * s->pp; i++) {
        plan_time t = plan_rank_time(a, &ranks[i], s->tp, &load);
        if (plan_seconds(&t) > plan_seconds(&slowest)) slowest = t;
    }
    plan_rate r = {.running = n * s->dp, .step_s = plan_seconds(&slowest) * s->pp, .bound = plan_bound(&slowest, kv_full)};
    r.output = (double)r.running / r.step_s;
    r.total = prompts ? r.output * (1 + (double)a->input / ((double)a->samples * a->output)) : r.output;
    return r;
}

/* A split that passes plan_check_split. It fits if a replica holds one sequence of the length that must be possible. */
static plan_split plan_split_of(const plan_ask *a, int tp, int pp, int dp, int must_hold) {
    plan_split s = {.tp = tp, .pp = pp, .dp = dp, .kv_tokens = INT64_MAX};
    plan_rank ranks[PLAN_MOST_GPUS];
    for (int i = 0; i < tp * pp; i++) {
        const plan_rank *p = &ranks[i];
        ranks[i] = plan_rank_of(a, tp, pp, i / tp, i % tp);
        s.weights = MAX(s.weights, p->weights), s.scratch = MAX(s.scratch, p->scratch);
        s.token_bytes = MAX(s.token_bytes, p->token_bytes), s.kv_tokens = MIN(s.kv_tokens, p->kv_tokens);
    }
    s.fits = s.kv_tokens >= must_hold;
    s.kv_tokens = s.fits ? s.kv_tokens * dp : 0;
    s.at_len = (double)s.kv_tokens / a->max_len;
    if (s.fits) s.decode = plan_rate_of(a, ranks, &s, false), s.work = plan_rate_of(a, ranks, &s, true);
    return s;
}

/* All splits of a->gpus that the model allows into out[PLAN_MOST_GPUS], small tp and then small pp first; their number. */
static int plan_splits(const plan_ask *a, int must_hold, plan_split *out) {
    toka_err e;
    int n = 0;
    for (int tp = 1; tp <= a->gpus; tp++)
        for (int pp = 1; pp <= a->gpus / tp; pp++)
            if (a->gpus % tp == 0 && a->gpus / tp % pp == 0 && !plan_check_split(&a->model->shape, tp, pp, &e))
                out[n++] = plan_split_of(a, tp, pp, a->gpus / tp / pp, must_hold);
    return n;
}

/* The split with the most output; one that is more cut up must be 2 % better. NULL: none fits. */
static const plan_split *plan_best(const plan_split *s, int n) {
    const plan_split *best = NULL;
    for (int i = 0; i < n; i++)
        if (s[i].fits && (!best || s[i].work.output > 1.02 * best->work.output)) best = &s[i];
    return best;
}

/* The fewest GPUs of this kind that hold the model once; 0: not even PLAN_MOST_GPUS. */
static int plan_least(plan_ask a, int must_hold) {
    plan_split s[PLAN_MOST_GPUS];
    for (a.gpus = 1; a.gpus <= PLAN_MOST_GPUS; a.gpus++)
        if (plan_best(s, plan_splits(&a, must_hold, s))) return a.gpus;
    return 0;
}

/* ---- What is asked ---- */

typedef struct plan_options { /* of the command line; 0, NULL: not given */
    const char *model, *models_file, *gpu;
    int gpus, max_len, max_seqs, max_tokens, input, output, samples;
    double utilization;
    bool json;
} plan_options;

static bool plan_same_name(const char *a, const char *b) { /* "rtx 4090" is RTX-4090 */
    for (;; a++, b++) {
        while (*a && !isalnum((unsigned char)*a)) a++;
        while (*b && !isalnum((unsigned char)*b)) b++;
        if (tolower((unsigned char)*a) != tolower((unsigned char)*b)) return false;
        if (!*a) return true;
    }
}

static int plan_find_gpu(const char *name, const plan_gpu **out, toka_err *e) {
    char names[200] = "";
    for (int i = 0; i < COUNT(plan_gpus); i++) {
        const plan_gpu *g = &plan_gpus[i];
        if (plan_same_name(g->name, name)) return *out = g, 0;
        size_t at = strlen(names);
        snprintf(names + at, sizeof names - at, "%s%s", !i ? "" : i + 1 < COUNT(plan_gpus) ? ", " : " or ", g->name);
    }
    return fail(e, TOKA_E_USE, "--gpu: '%s', expected %s", name, names);
}

/* The flags into *a, where a->model stands already. *must_hold: tokens of the sequence that has to fit. */
static int plan_check(const plan_options *o, plan_ask *a, int *must_hold, toka_err *e) {
    const struct { const char *name; int value, least, most; } numbers[] = {
        {"--gpus", o->gpus, 1, PLAN_MOST_GPUS}, {"--max-num-seqs", o->max_seqs, 0, 65536},
        {"--max-num-batched-tokens", o->max_tokens, 0, 65536}, {"--samples", o->samples, 1, ENG_MAX_N},
        {"--input-len", o->input, 1, 1 << 30}, {"--output-len", o->output, 1, 1 << 30}};
    for (int i = 0; i < COUNT(numbers); i++)
        if (numbers[i].value < numbers[i].least || numbers[i].value > numbers[i].most)
            return fail(e, TOKA_E_USE, "%s: %d, expected %d to %d", numbers[i].name, numbers[i].value, numbers[i].least,
                        numbers[i].most);
    if (!(o->utilization >= 0 && o->utilization <= 1))
        return fail(e, TOKA_E_USE, "--gpu-memory-utilization: %g, expected 0 to 1", o->utilization);
    int limit = a->model->shape.max_len;
    if (o->max_len < 0 || o->max_len > limit || o->max_len == 1)
        return fail(e, TOKA_E_USE, "--max-model-len: %d, expected 2 to %d, the model's own limit", o->max_len, limit);
    a->max_tokens = o->max_tokens ? o->max_tokens : MAX(TOKA_GPU_TOKENS, o->max_seqs); /* as eng_open does it */
    a->max_seqs = o->max_seqs ? o->max_seqs : MIN(TOKA_GPU_SEQS, a->max_tokens);
    if (a->max_seqs > a->max_tokens)
        return fail(e, TOKA_E_USE, "--max-num-batched-tokens: %d, expected at least --max-num-seqs, %d", a->max_tokens,
                    a->max_seqs);
    a->max_len = o->max_len ? o->max_len : limit;
    a->gpus = o->gpus, a->input = o->input, a->output = o->output, a->samples = o->samples;
    a->utilization = toka_gpu_utilization(o->utilization);
    if (o->input > a->max_len - o->output)
        return fail(e, TOKA_E_USE, "--input-len %d and --output-len %d: expected at most %d in all, the longest sequence",
                    o->input, o->output, a->max_len);
    *must_hold = o->max_len ? a->max_len : o->input + o->output;
    return plan_find_gpu(o->gpu, &a->gpu, e);
}

/* A name or hub id of models.txt needs no files; a folder, and a hub id in the cache, need config.json. *c and *name live in *m
 * or *lines, which the caller gives back. */
static int plan_find_model(const plan_options *o, mf_model **m, arena *lines, const mf_config **c, const char **name,
                           toka_err *e) {
    struct stat st;
    const mf_known *known = NULL;
    int code = o->model && stat(o->model, &st) ? run_find_known(o->models_file, o->model, lines, &known, e) : 0;
    if (code) return code;
    if (known) return *c = &known->config, *name = known->name, 0;
    if ((code = mf_open_text(m, o->model, o->models_file, o->model ? NULL : embedded_model, e))) return code;
    *c = &(*m)->config, *name = (*m)->name;
    return 0;
}

/* ---- What is answered ---- */

static const char *plan_commas(int64_t n, char z[32]) { /* 1,234,567; n at least 0 */
    char digits[24];
    int len = snprintf(digits, sizeof digits, "%lld", (long long)n), at = 0;
    for (int i = 0; i < len; i++) {
        if (i && (len - i) % 3 == 0) z[at++] = ',';
        z[at++] = digits[i];
    }
    z[at] = 0;
    return z;
}
static const char *plan_round(double x, char z[32]) { /* to three digits: a roofline knows no more */
    double unit = x >= 1 ? pow(10, floor(log10(x)) - 2) : 1;
    return plan_commas((int64_t)(floor(x / unit + 0.5) * unit + 0.5), z);
}

static void plan_put_flags(const plan_options *o, const plan_split *s, buf *b) {
    const struct { const char *name; int value; } flags[] = {
        {"tensor-parallel-size", s->tp}, {"pipeline-parallel-size", s->pp}, {"data-parallel-size", s->dp},
        {"max-model-len", o->max_len}, {"max-num-seqs", o->max_seqs}, {"max-num-batched-tokens", o->max_tokens}};
    for (int i = 0; i < COUNT(flags); i++)
        if (flags[i].value > (i < 3)) buf_printf(b, "%s--%s %d", b->n ? " " : "", flags[i].name, flags[i].value);
    if (o->utilization > 0) buf_printf(b, "%s--gpu-memory-utilization %g", b->n ? " " : "", o->utilization);
}

/* What of this can be run by this very program. */
static void plan_put_today(const plan_ask *a, buf *b) {
    const plan_gpu *g = a->gpu;
    buf_printf(b, "toka %s ", TOKA_VERSION);
    if (g->arch > 90)
        buf_printf(b, "has no machine code for compute capability %d.%d: it cannot run on a %s", g->arch / 10, g->arch % 10,
                   g->name);
    else if (a->gpus > 1)
        buf_printf(b, "runs a model on one GPU: a split over %d is arithmetic so far, nothing that it can run", a->gpus);
    else
        buf_printf(b, "runs a model on one GPU: this can be run %s",
                   pub_backend("cuda") ? "by this build" : "by a build with the GPU half, which this is not");
}

static void plan_put_head(const plan_ask *a, const char *name, buf *b) {
    char z[32], y[32];
    const plan_gpu *g = a->gpu;
    const mf_config *c = a->model;
    double parameters = (double)mf_n_parameters(c);
    buf_printf(b, "%s: %.3g B parameters, %.3g GB as bf16; %s bytes of K and V a token\n", name, 1e-9 * parameters,
               2e-9 * parameters, plan_commas((int64_t)4 * c->shape.L * c->shape.K * c->shape.D, z));
    buf_printf(b, "%d x %s: %.1f GiB, of which %g %% are taken; %.0f TFLOP/s, %.2f TB/s, link %.0f GB/s (%s)\n", a->gpus, g->name,
               g->memory / 0x1p30, 100 * a->utilization, 1e-12 * g->flops, 1e-12 * g->read, 1e-9 * g->link, g->source);
    buf_printf(b, "workload: %d tokens in, %d out, %d answer%s a prompt; ", a->input, a->output, a->samples,
               a->samples > 1 ? "s" : "");
    buf_printf(b, "a replica runs at most %s sequences, %s tokens a step\n\n", plan_commas(a->max_seqs, z),
               plan_commas(a->max_tokens, y));
}

static void plan_put_row(const plan_split *s, buf *b) {
    char kv[32], running[32], decode[32], output[32], total[32];
    buf_printf(b, "%3d %3d %3d %8.1f %8.1f", s->tp, s->pp, s->dp, 1e-9 * (double)s->weights, 1e-9 * (double)s->scratch);
    if (s->fits)
        buf_printf(b, " %12s %9.1f %8s %10s  %-12s %10s %10s  %s\n", plan_commas(s->kv_tokens, kv), s->at_len,
                   plan_commas(s->work.running, running), plan_round(s->decode.output, decode), s->decode.bound,
                   plan_round(s->work.output, output), plan_round(s->work.total, total), s->work.bound);
    else buf_c(b, "  does not fit\n");
}

/* Ways to cut the model up that it does not allow, a sentence each. */
static void plan_put_refused(const plan_ask *a, bool as_json, buf *b) {
    toka_err e;
    for (int k = 1; k <= a->gpus; k++)
        for (int i = 0; i < 2; i++) {
            if (a->gpus % k || !plan_check_split(&a->model->shape, i ? 1 : k, i ? k : 1, &e)) continue;
            if (as_json) json_put_str(b, str_c(e.msg));
            else buf_printf(b, "not possible: %s\n", e.msg);
        }
}

static void plan_put_text(const plan_options *o, const plan_ask *a, const char *name, const plan_split *s, int n, buf *b) {
    char z[32], y[40];
    buf flags = {0};
    plan_put_head(a, name, b);
    buf_printf(b, "%-11s %-17s %-31s %-23s %s\n", "split", "GB on a GPU", "on all", "decode alone", "the workload");
    snprintf(y, sizeof y, "x%s", plan_commas(a->max_len, z));
    buf_printf(b, "%3s %3s %3s %8s %8s %12s %9s %8s %10s  %-12s %10s %10s  %s\n", "tp", "pp", "dp", "weights", "scratch",
               "KV tokens", y, "running", "tok/s", "bound", "out tok/s", "all tok/s", "bound");
    for (int i = 0; i < n; i++) plan_put_row(&s[i], b);
    plan_put_refused(a, false, b);
    plan_put_flags(o, plan_best(s, n), &flags);
    buf_printf(b, "\nrecommended: %s\n", flags.n ? flags.p : "no flags, the defaults do");
    plan_put_today(a, b);
    buf_char(b, '\n');
    buf_free(&flags);
}

static void plan_put_json_rate(const char *name, const plan_rate *r, buf *b) {
    json_put_key(b, name), json_put_open(b, '{');
    json_put_key(b, "running"), json_put_int(b, r->running);
    json_put_key(b, "step_ms"), json_put_num(b, 1e3 * r->step_s, true);
    json_put_key(b, "output_tokens_per_second"), json_put_num(b, r->output, true);
    json_put_key(b, "tokens_per_second"), json_put_num(b, r->total, true);
    json_put_key(b, "bound"), json_put_str(b, str_c(r->bound));
    json_put_close(b, '}');
}

static void plan_put_json_split(const plan_options *o, const plan_split *s, buf *b) {
    const struct { const char *name; int64_t value; } numbers[] = {
        {"tensor_parallel_size", s->tp}, {"pipeline_parallel_size", s->pp}, {"data_parallel_size", s->dp},
        {"weight_bytes", s->weights}, {"scratch_bytes", s->scratch},
        {"kv_bytes_per_token", s->token_bytes}, {"kv_tokens", s->kv_tokens}};
    buf flags = {0};
    json_put_open(b, '{');
    for (int i = 0; i < COUNT(numbers); i++) json_put_key(b, numbers[i].name), json_put_int(b, numbers[i].value);
    json_put_key(b, "fits"), json_put_bool(b, s->fits);
    if (s->fits) {
        plan_put_flags(o, s, &flags);
        json_put_key(b, "sequences_of_max_model_len"), json_put_num(b, s->at_len, true);
        plan_put_json_rate("decode", &s->decode, b), plan_put_json_rate("workload", &s->work, b);
        json_put_key(b, "flags"), json_put_str(b, buf_view(&flags));
    }
    json_put_close(b, '}');
    buf_free(&flags);
}

static void plan_put_json(const plan_options *o, const plan_ask *a, const char *name, const plan_split *s, int n, buf *b) {
    const plan_gpu *g = a->gpu;
    const struct { const char *name; double value; } rates[] = {
        {"memory_bytes", g->memory}, {"flops", g->flops}, {"read_bytes_per_second", g->read}, {"link_bytes_per_second", g->link}};
    const struct { const char *name; int64_t value; } asked[] = {
        {"gpus", a->gpus}, {"n_parameters", mf_n_parameters(a->model)}, {"max_model_len", a->max_len},
        {"max_num_seqs", a->max_seqs}, {"max_num_batched_tokens", a->max_tokens}, {"input_len", a->input},
        {"output_len", a->output}, {"samples", a->samples}};
    buf today = {0};
    plan_put_today(a, &today);
    json_put_open(b, '{');
    json_put_key(b, "model"), json_put_str(b, str_c(name));
    for (int i = 0; i < COUNT(asked); i++) json_put_key(b, asked[i].name), json_put_int(b, asked[i].value);
    json_put_key(b, "gpu_memory_utilization"), json_put_num(b, a->utilization, false);
    json_put_key(b, "gpu"), json_put_open(b, '{');
    json_put_key(b, "name"), json_put_str(b, str_c(g->name));
    for (int i = 0; i < COUNT(rates); i++) json_put_key(b, rates[i].name), json_put_int(b, (int64_t)rates[i].value);
    json_put_key(b, "source"), json_put_str(b, str_c(g->source));
    json_put_close(b, '}');
    json_put_key(b, "splits"), json_put_open(b, '[');
    for (int i = 0; i < n; i++) plan_put_json_split(o, &s[i], b);
    json_put_close(b, ']');
    json_put_key(b, "not_possible"), json_put_open(b, '['), plan_put_refused(a, true, b), json_put_close(b, ']');
    json_put_key(b, "recommended"), plan_put_json_split(o, plan_best(s, n), b);
    json_put_key(b, "note"), json_put_str(b, buf_view(&today));
    json_put_close(b, '}'), buf_char(b, '\n');
    buf_free(&today);
}

/* The table, or one JSON object, into *out. A model that does not fit is an error that says how many GPUs hold it. */
static int plan_make(const plan_options *o, buf *out, toka_err *e) {
    arena lines = {0};
    mf_model *m = NULL;
    plan_ask a = {0};
    plan_split s[PLAN_MOST_GPUS];
    const char *name = NULL;
    int must_hold = 0, n = 0, code = plan_find_model(o, &m, &lines, &a.model, &name, e);
    if (!code) code = plan_check(o, &a, &must_hold, e);
    if (!code) n = plan_splits(&a, must_hold, s);
    if (!code && !plan_best(s, n)) {
        int least = plan_least(a, must_hold);
        char tell[64] = "no number of them does that is tried here";
        if (least) snprintf(tell, sizeof tell, "at least %d are needed", least);
        code = fail(e, TOKA_E_USE,
                    "%s: %.3g GB of weights and a sequence of %d tokens do not fit on %d x %s, however they are split; %s",
                    name, 2e-9 * (double)mf_n_parameters(a.model), must_hold, a.gpus, a.gpu->name, tell);
    }
    if (!code) (o->json ? plan_put_json : plan_put_text)(o, &a, name, s, n, out);
    mf_close(m), arena_free(&lines);
    return code;
}

/* ===========================================================================
 * MARK: 28. Bench serve [os]
 * A client that measures a server over HTTP: ours, or any that streams /v1/completions or /v1/chat/completions. Definitions,
 * names and printed lines are those of `vllm bench serve`:
 *
 *     TTFT  from sending a request to its first chunk      TPOT  (E2EL - TTFT) / (output tokens - 1)
 *     ITL   from one chunk to the next                     E2EL  from sending a request to its last chunk
 *
 * One thread, one epoll:  bs_run --bs_start--> bs_on_ready (writes, reads) --bs_reply_take, bs_on_line--> bs_end --> bs_measure
 *
 * Open loop: requests come at times drawn beforehand (bs_draw_times), whatever the server does. Closed loop: at most
 * --max-concurrency are under way, the others wait in order. A random prompt is a list of token ids, so that its length is exact;
 * which ids there are is learnt from the server's own /tokenize. Without that, and for chats, it is so many random words.
 * What counts as tokens is what the server says in "usage". A chunk's time is that of the read() that brought it.
 * =========================================================================== */

enum { BS_LINE_BYTES = 64 << 20, BS_HEAD_BYTES = 64 << 10, BS_WORDS = 4000 };

typedef struct bs_options { /* what toka bench serve was asked to do */
    const char *base_url;   /* "http://host:port", or NULL: host and port */
    const char *host, *endpoint, *model, *dataset; /* model NULL: the server's first; dataset NULL: random prompts */
    int port, num_prompts, input_len, output_len, prefix_len, max_concurrency, num_warmups, ready_s;
    double range_ratio, request_rate, burstiness, temperature; /* request_rate INFINITY: all at once */
    uint64_t seed;
    bool ignore_eos, json, detailed, quiet;
    const char *extra_body; /* a JSON object whose members go into every request, or NULL */
    const char *goodput, *metrics, *percentiles; /* "ttft:200 e2el:3000", "ttft,itl", "50,99" */
    atomic_int *interrupted;
} bs_options;

typedef struct bs_request {
    size_t at, n;    /* the prompt: ids or, if text, bytes */
    bool text, chunked; /* chunked: a chunk has come */
    int max_tokens;
    double due;      /* seconds after the start of the run */
    double start, first, last; /* on os_now's clock: sent, first chunk, last chunk */
    buf gaps;        /* float [chunks - 1], seconds */
    int64_t n_in, n_out; /* tokens */
    char *error;     /* NULL: it succeeded */
} bs_request;

enum bs_state { BS_HEAD, BS_SIZE, BS_CHUNK, BS_CHUNK_END, BS_TRAILER, BS_LENGTH, BS_TO_CLOSE, BS_WHOLE };

typedef struct bs_reply { /* an HTTP response as its bytes come */
    enum bs_state state;
    int status;
    bool chunked, close, any; /* any: a byte of it has come */
    int64_t left; /* of the chunk or the body; -1: no Content-Length */
    buf line;
} bs_reply;

typedef struct bs_conn {
    int fd, request; /* request -1: idle */
    bool reused;     /* answered before: the server may have closed it meanwhile */
    buf out;
    size_t sent;
    bs_reply reply;
    buf line;        /* of the event stream, or the body of an error */
    bool done;       /* data: [DONE] */
    struct bs_conn *next; /* idle ones */
} bs_conn;

typedef struct bs { /* the whole of it */
    const bs_options *o;
    struct sockaddr_storage address;
    socklen_t address_bytes;
    char host[256], prefix[256], model[256];
    const char *key; /* OPENAI_API_KEY or NULL */
    str extra;       /* what stands between the braces of --extra-body */
    ids tokens, vocabulary; /* of all prompts; what random ones are drawn from */
    buf texts;
    bs_request *requests; /* [n] */
    int64_t n, cap, next, n_ended, n_running;
    uint64_t n_random;
    int epoll;
    bs_conn *idle;
    double t0, end; /* of the run */
} bs;

/* ---- Random numbers ---- */

static double bs_unit(bs *b) { return (double)(api_seed(b->o->seed, (uint64_t[2]){0, b->n_random++}) >> 11) * 0x1p-53; }

static int64_t bs_between(bs *b, int64_t lo, int64_t hi) { return lo + (int64_t)(bs_unit(b) * (double)(hi - lo + 1)); }

/* From a gamma distribution of this shape and scale 1 (Marsaglia & Tsang, 2000; below 1 by their boost). */
static double bs_gamma(bs *b, double shape) {
    double boost = 1;
    if (shape < 1) boost = pow(1 - bs_unit(b), 1 / shape), shape += 1;
    double d = shape - 1.0 / 3, c = 1 / sqrt(9 * d);
    for (;;) {
        double x = sqrt(-2 * log(1 - bs_unit(b))) * cos(6.283185307179586 * bs_unit(b)), v = 1 + c * x;
        if (v <= 0) continue;
        v = v * v * v;
        if (log(1 - bs_unit(b)) < x * x / 2 + d - d * v + d * log(v)) return d * v * boost;
    }
}

/* When each request comes: gaps of mean 1 / rate, scaled so that all come in exactly n / rate seconds. */
static void bs_draw_times(bs *b) {
    double rate = b->o->request_rate, sum = 0;
    if (!isfinite(rate)) return;
    for (int64_t i = 0; i < b->n; i++) b->requests[i].due = sum += isfinite(b->o->burstiness) ? bs_gamma(b, b->o->burstiness) : 1;
    for (int64_t i = 0; i < b->n; i++) b->requests[i].due *= (double)b->n / rate / sum;
}

/* ---- Reading a response ---- */

/* Adds bytes up to a line feed to line; *used counts them. 1: the line is complete, without its end; 0: more is needed; -1: too
 * long. */
static int bs_take_line(buf *line, str in, size_t most, size_t *used) {
    const char *feed = in.n ? memchr(in.p, '\n', in.n) : NULL;
    size_t n = feed ? (size_t)(feed - in.p) : in.n;
    *used = n + (feed != NULL);
    if (line->n + n > most) return -1;
    buf_put(line, in.p, n);
    if (feed && line->n && line->p[line->n - 1] == '\r') line->p[--line->n] = 0;
    return feed != NULL;
}

static bool bs_header(str line, const char *name, str *value) {
    size_t n = strlen(name);
    if (line.n <= n || line.p[n] != ':' || strncasecmp(line.p, name, n)) return false;
    *value = str_sub(line, n + 1, line.n);
    while (value->n && (*value->p == ' ' || *value->p == '\t')) *value = str_sub(*value, 1, value->n);
    return true;
}

/* A line of the head, its empty last line too. */
static bool bs_head_line(bs_reply *r, str line) {
    str value;
    int status;
    if (!r->status) {
        r->left = -1;
        return sscanf(line.p, "HTTP/1.%*1d %3d", &status) == 1 && (r->status = status) >= 100;
    }
    if (bs_header(line, "content-length", &value)) r->left = strtoll(value.p, NULL, 10);
    if (bs_header(line, "transfer-encoding", &value)) r->chunked = !strncasecmp(value.p, "chunked", 7);
    if (bs_header(line, "connection", &value)) r->close = !strncasecmp(value.p, "close", 5);
    if (line.n) return true;
    if (r->status < 200) r->status = 0; /* 100 Continue: the real head follows */
    else if (r->chunked) r->state = BS_SIZE;
    else if (r->left == 0 || r->status == 204) r->state = BS_WHOLE;
    else r->state = r->left > 0 ? BS_LENGTH : BS_TO_CLOSE;
    return true;
}

/* Takes bytes of a response; *body gets those that belong to its body. Returns how many it took (all of them, sooner or later,
 * until the state is BS_WHOLE), or -1 if this is no HTTP. */
static ptrdiff_t bs_reply_take(bs_reply *r, str in, str *body) {
    size_t used = 0;
    *body = STR("");
    r->any = true;
    if (r->state == BS_LENGTH || r->state == BS_CHUNK || r->state == BS_TO_CLOSE) {
        size_t n = r->state == BS_TO_CLOSE ? in.n : (size_t)MIN((int64_t)in.n, r->left);
        *body = str_sub(in, 0, n);
        if (r->state != BS_TO_CLOSE && !(r->left -= (int64_t)n)) r->state = r->state == BS_LENGTH ? BS_WHOLE : BS_CHUNK_END;
        return (ptrdiff_t)n;
    }
    int got = bs_take_line(&r->line, in, BS_HEAD_BYTES, &used);
    if (got <= 0) return got ? -1 : (ptrdiff_t)used;
    str line = buf_view(&r->line);
    bool good = true;
    if (r->state == BS_HEAD) {
        good = bs_head_line(r, line);
    } else if (r->state == BS_SIZE) {
        good = line.n && isxdigit((unsigned char)line.p[0]) && (r->left = (int64_t)strtoull(line.p, NULL, 16)) >= 0;
        r->state = r->left ? BS_CHUNK : BS_TRAILER;
    } else if (r->state == BS_CHUNK_END) {
        good = !line.n, r->state = BS_SIZE;
    } else if (!line.n) {
        r->state = BS_WHOLE;
    }
    buf_clear(&r->line);
    return good ? (ptrdiff_t)used : -1;
}

static void bs_reply_free(bs_reply *r) {
    buf_free(&r->line);
    *r = (bs_reply){0};
}

/* ---- The server's address, and calls to it before the run ---- */

static int bs_resolve(bs *b, toka_err *e) {
    const char *url = b->o->base_url, *p = url;
    char port[8];
    int n = b->o->port, code;
    snprintf(b->host, sizeof b->host, "%s", b->o->host);
    if (url) {
        bool plain = !strncmp(url, "http://", 7);
        p += 7 * plain, n = 80;
        size_t host = strcspn(p, ":/");
        if (!plain || !host || host >= sizeof b->host)
            return fail(e, TOKA_E_USE, "--base-url: '%s', expected http://HOST[:PORT] (no TLS)", url);
        snprintf(b->host, sizeof b->host, "%.*s", (int)host, p);
        p += host;
        if (*p == ':') n = (int)strtol(p + 1, (char **)(void *)&p, 10);
        size_t tail = strlen(p);
        while (tail && p[tail - 1] == '/') tail--;
        if ((*p && *p != '/') || tail >= sizeof b->prefix)
            return fail(e, TOKA_E_USE, "--base-url: '%s', expected http://HOST[:PORT] (no TLS)", url);
        snprintf(b->prefix, sizeof b->prefix, "%.*s", (int)tail, p);
    }
    if (n < 1 || n > 65535) return fail(e, TOKA_E_USE, "port %d: expected 1 to 65535", n);
    snprintf(port, sizeof port, "%d", n);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    if ((code = getaddrinfo(b->host, port, &hints, &found))) return fail(e, TOKA_E_USE, "%s: %s", b->host, gai_strerror(code));
    memcpy(&b->address, found->ai_addr, found->ai_addrlen), b->address_bytes = found->ai_addrlen;
    freeaddrinfo(found);
    return 0;
}

/* The bytes of a request; body.p NULL: GET. */
static void bs_put_request(const bs *b, const char *path, str body, buf *out) {
    buf_clear(out);
    buf_printf(out, "%s %s%s HTTP/1.1\r\nHost: %s\r\n", body.p ? "POST" : "GET", b->prefix, path, b->host);
    if (b->key) buf_printf(out, "Authorization: Bearer %s\r\n", b->key);
    if (body.p) buf_printf(out, "Content-Type: application/json\r\nContent-Length: %zu\r\n", body.n);
    buf_c(out, "\r\n");
    buf_str(out, body);
}

/* One request and its whole answer, waited for. Returns the HTTP status, or an error. */
static int bs_call(const bs *b, const char *path, str body, buf *answer, toka_err *e) {
    enum { SECONDS = 30 };
    buf out = {0}, in = {0};
    bs_reply r = {0};
    struct timeval wait = {.tv_sec = SECONDS};
    int code = 0, fd = socket(b->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    buf_clear(answer);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait), setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait);
    bs_put_request(b, path, body, &out);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&b->address, b->address_bytes))
        code = fail(e, TOKA_E_IO, "%s: %s", b->host, strerror(errno));
    for (size_t at = 0; at < out.n && !code;) {
        ssize_t n = send(fd, out.p + at, out.n - at, MSG_NOSIGNAL);
        if (n > 0) at += (size_t)n;
        else code = fail(e, TOKA_E_IO, "%s: %s", b->host, strerror(errno));
    }
    buf_reserve(&in, 65536);
    while (!code && r.state != BS_WHOLE) {
        ssize_t n = recv(fd, in.p, 65536, 0);
        if (n == 0 && r.state == BS_TO_CLOSE) break;
        if (n <= 0) code = fail(e, TOKA_E_IO, "%s%s: %s", b->host, path, n ? strerror(errno) : "the connection was closed");
        for (str piece, left = {in.p, (size_t)MAX(n, 0)}; left.n && !code && r.state != BS_WHOLE;) {
            ptrdiff_t used = bs_reply_take(&r, left, &piece);
            if (used < 0 || answer->n > BS_LINE_BYTES) code = fail(e, TOKA_E_IO, "%s%s: not an HTTP response", b->host, path);
            else left = str_sub(left, (size_t)used, left.n), buf_str(answer, piece);
        }
    }
    if (!code) code = r.status;
    if (fd >= 0) close(fd);
    buf_free(&out), buf_free(&in), bs_reply_free(&r);
    return code;
}

/* Asks for the list of models until the server answers; takes the first for its name if none was given. */
static int bs_wait_ready(bs *b, toka_err *e) {
    buf answer = {0};
    arena a = {0};
    double until = os_now() + b->o->ready_s, told = 0;
    int code;
    while ((code = bs_call(b, "/v1/models", (str){0}, &answer, e)) != 200) {
        if (code > 0) fail(e, TOKA_E_IO, "%s/v1/models: HTTP status %d: %.*s", b->host, code, STRF(buf_view(&answer)));
        if (os_now() > until || *b->o->interrupted || (code > 0 && code != 503)) break;
        if (!told++ && !b->o->quiet) fprintf(stderr, "toka bench: waiting for the server: %s\n", e->msg);
        usleep(200000);
    }
    if (code == 200) {
        const json *root = json_parse(&a, buf_view(&answer), json_trusted, e);
        str name = b->o->model ? str_c(b->o->model) : json_str(json_get(json_at(json_get(root, "data"), 0), "id"));
        snprintf(b->model, sizeof b->model, "%.*s", (int)MIN(name.n, sizeof b->model - 1), name.p);
        code = !root ? e->code : name.n ? 0 : fail(e, TOKA_E_IO, "%s: no model in /v1/models; give one with --model", b->host);
    } else {
        code = *b->o->interrupted ? fail(e, TOKA_E_CANCELLED, "interrupted") : e->code;
    }
    buf_free(&answer), arena_free(&a);
    return code;
}

/* ---- What is sent ---- */

static void bs_put_words(bs *b, int64_t n, buf *out) {
    for (int64_t i = 0; i < n; i++) {
        if (i) buf_char(out, ' ');
        for (int64_t k = bs_between(b, 1, 8); k > 0; k--) buf_char(out, (char)('a' + bs_between(b, 0, 25)));
    }
}

/* Token ids that occur in text, as the server's tokenizer says; none if it has no /tokenize. */
static void bs_learn_vocabulary(bs *b) {
    buf text = {0}, body = {0}, answer = {0};
    arena a = {0};
    toka_err ignored;
    bs_put_words(b, BS_WORDS, &text);
    json_put_open(&body, '{');
    json_put_key(&body, "model"), json_put_str(&body, str_c(b->model));
    json_put_key(&body, "prompt"), json_put_str(&body, buf_view(&text));
    json_put_key(&body, "add_special_tokens"), json_put_bool(&body, false);
    json_put_close(&body, '}');
    if (bs_call(b, "/tokenize", buf_view(&body), &answer, &ignored) == 200) {
        const json *tokens = json_get(json_parse(&a, buf_view(&answer), json_trusted, &ignored), "tokens");
        if (json_is(tokens, JSON_ARRAY)) JSON_EACH(it, tokens) ids_push(&b->vocabulary, (int32_t)json_int(it, 0));
    }
    buf_free(&text), buf_free(&body), buf_free(&answer), arena_free(&a);
}

static bs_request *bs_add(bs *b, int max_tokens) {
    if (b->n == b->cap) {
        b->cap = MAX(1024, 2 * b->cap);
        b->requests = mem_realloc(b->requests, (size_t)b->cap * sizeof *b->requests);
    }
    b->requests[b->n] = (bs_request){.max_tokens = max_tokens};
    return &b->requests[b->n++];
}

static bool bs_is_chat(const bs *b) { return str_ends(str_c(b->o->endpoint), STR("/chat/completions")); }

static int bs_random_prompts(bs *b, toka_err *e) {
    const bs_options *o = b->o;
    const double r = o->range_ratio;
    if (o->input_len < 1 || o->output_len < 1 || o->prefix_len < 0 || !(r >= 0 && r < 1))
        return fail(e, TOKA_E_USE,
                    "--random-input-len %d, --random-output-len %d, --random-prefix-len %d, --random-range-ratio %g: "
                    "expected at least 1, 1, 0, and a ratio below 1",
                    o->input_len, o->output_len, o->prefix_len, r);
    if (!bs_is_chat(b)) bs_learn_vocabulary(b);
    bool text = !b->vocabulary.n;
    size_t prefix_at = text ? b->texts.n : b->tokens.n;
    for (int64_t i = 0; i < (o->num_prompts ? o->num_prompts : 1000); i++) {
        int64_t in = MAX(1, bs_between(b, (int64_t)floor(o->input_len * (1 - r)), (int64_t)ceil(o->input_len * (1 + r))));
        int64_t out = MAX(1, bs_between(b, (int64_t)floor(o->output_len * (1 - r)), (int64_t)ceil(o->output_len * (1 + r))));
        bs_request *q = bs_add(b, (int)out);
        q->text = text, q->at = text ? b->texts.n : b->tokens.n;
        if (text) {
            bs_put_words(b, o->prefix_len + in, &b->texts);
        } else {
            ids_reserve(&b->tokens, (size_t)(o->prefix_len + in));
            for (int64_t k = 0; k < o->prefix_len + in; k++) {
                bool shared = k < o->prefix_len && i; /* the first prompt's beginning is everybody's */
                ids_push(&b->tokens, shared ? b->tokens.p[prefix_at + (size_t)k]
                                            : b->vocabulary.p[bs_between(b, 0, (int64_t)b->vocabulary.n - 1)]);
            }
        }
        q->n = (text ? b->texts.n : b->tokens.n) - q->at;
        q->n_in = text ? 0 : (int64_t)q->n;
    }
    return 0;
}

/* A line of the dataset: {"prompt_token_ids" or "prompt", and "output_lengths": a request for each, or "output_tokens", or
 * neither}. */
static int bs_dataset_line(bs *b, const json *root, int64_t number, toka_err *e) {
    const json *list = json_get(root, "prompt_token_ids"), *text = json_get(root, "prompt"),
               *lengths = json_get(root, "output_lengths");
    bs_request q = {.text = json_is(text, JSON_STRING) && !list};
    q.at = q.text ? b->texts.n : b->tokens.n;
    if (q.text) buf_str(&b->texts, json_str(text));
    else if (json_is(list, JSON_ARRAY))
        JSON_EACH(it, list) ids_push(&b->tokens, (int32_t)MAX(-1, MIN(json_int(it, -1), INT32_MAX)));
    q.n = (q.text ? b->texts.n : b->tokens.n) - q.at;
    if (!q.n)
        return fail(e, TOKA_E_INPUT, "%s: line %lld: expected prompt_token_ids or prompt", b->o->dataset, (long long)number);
    if (!q.text && bs_is_chat(b))
        return fail(e, TOKA_E_USE, "%s: line %lld: a prompt of token ids cannot go to %s", b->o->dataset, (long long)number,
                    b->o->endpoint);
    q.n_in = q.text ? 0 : (int64_t)q.n;
    if (!lengths) {
        q.max_tokens = (int)MIN(json_int(json_get(root, "output_tokens"), b->o->output_len), INT_MAX);
        *bs_add(b, 0) = q;
        return 0;
    }
    if (!json_is(lengths, JSON_ARRAY))
        return fail(e, TOKA_E_INPUT, "%s: line %lld: output_lengths: expected a list", b->o->dataset, (long long)number);
    JSON_EACH(it, lengths) q.max_tokens = (int)MIN(json_int(it, 0), INT_MAX), *bs_add(b, 0) = q;
    return 0;
}

static int bs_load(bs *b, toka_err *e) {
    run_input in;
    str line;
    int code = 0, fd = open(b->o->dataset, O_RDONLY | O_CLOEXEC);
    int64_t n_lines = 0;
    if (fd < 0) return fail(e, TOKA_E_INPUT, "%s: %s", b->o->dataset, strerror(errno));
    run_input_init(&in, fd, b->o->dataset, b->o->interrupted);
    while ((!b->o->num_prompts || n_lines < b->o->num_prompts) && (code = run_next_line(&in, &line, NULL, e)) > 0) {
        arena a = {0};
        toka_err why;
        bool blank = run_is_blank(line);
        const json *root = blank ? NULL : json_parse(&a, line, run_limits, &why);
        code = 0, n_lines += !blank;
        if (root) code = bs_dataset_line(b, root, in.number, e);
        else if (!blank) code = fail(e, TOKA_E_INPUT, "%s: line %lld: %s", b->o->dataset, (long long)in.number, why.msg);
        arena_free(&a);
        if (code) break;
    }
    if (!code && !b->n) code = fail(e, TOKA_E_INPUT, "%s: no lines", b->o->dataset);
    run_input_free(&in);
    close(fd);
    return code;
}

static void bs_put_body(const bs *b, const bs_request *q, buf *out) {
    str text = q->text ? (str){b->texts.p + q->at, q->n} : STR("");
    json_put_open(out, '{');
    json_put_key(out, "model"), json_put_str(out, str_c(b->model));
    if (bs_is_chat(b)) {
        buf_c(out, ",\"messages\":[{\"role\":\"user\",\"content\":"), json_put_str(out, text), buf_c(out, "}]");
    } else if (q->text) {
        json_put_key(out, "prompt"), json_put_str(out, text);
    } else {
        json_put_key(out, "prompt"), json_put_open(out, '[');
        for (size_t i = 0; i < q->n; i++) json_put_int(out, b->tokens.p[q->at + i]);
        json_put_close(out, ']');
    }
    json_put_key(out, "max_tokens"), json_put_int(out, q->max_tokens);
    json_put_key(out, "temperature"), json_put_num(out, b->o->temperature, false);
    json_put_key(out, "stream"), json_put_bool(out, true);
    buf_c(out, ",\"stream_options\":{\"include_usage\":true}");
    if (b->o->ignore_eos) json_put_key(out, "ignore_eos"), json_put_bool(out, true);
    if (b->extra.n) json_comma(out), buf_str(out, b->extra);
    json_put_close(out, '}');
}

/* ---- One request ---- */

static void bs_close(bs_conn *c) {
    if (c->fd >= 0) close(c->fd);
    buf_free(&c->out), buf_free(&c->line), bs_reply_free(&c->reply);
    free(c);
}

/* The request has its answer, or error says what went wrong. The connection is kept if it can be used again. */
static void bs_end(bs *b, bs_conn *c, const char *error) {
    bs_request *q = &b->requests[c->request];
    if (error && !q->error) q->error = mem_check(strdup(error));
    b->n_ended++, b->n_running--;
    c->request = -1;
    bool keep = c->reply.state == BS_WHOLE && !c->reply.close && !error;
    if (!keep) {
        bs_close(c);
        return;
    }
    bs_reply_free(&c->reply), buf_clear(&c->line);
    c->reused = true, c->next = b->idle, b->idle = c;
}

static bool bs_connect(bs *b, bs_conn *c) {
    int on = 1;
    c->fd = socket(b->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (c->fd < 0) return false;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct epoll_event ev = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = c};
    if (epoll_ctl(b->epoll, EPOLL_CTL_ADD, c->fd, &ev)) return false;
    return !connect(c->fd, (const struct sockaddr *)&b->address, b->address_bytes) || errno == EINPROGRESS;
}

/* As much of the request as the socket takes. */
static bool bs_write(bs_conn *c) {
    while (c->sent < c->out.n) {
        ssize_t n = send(c->fd, c->out.p + c->sent, c->out.n - c->sent, MSG_NOSIGNAL);
        if (n < 0) return errno == EAGAIN || errno == ENOTCONN;
        c->sent += (size_t)n;
    }
    return true;
}

/* Sends request number i over an idle connection or a new one. */
static void bs_start(bs *b, int64_t i, bool fresh) {
    buf body = {0};
    bs_conn *c = fresh ? NULL : b->idle;
    if (c) b->idle = c->next;
    else *(c = mem_zalloc(sizeof *c)) = (bs_conn){.fd = -1};
    c->request = (int)i, c->sent = 0, c->done = false;
    bs_put_body(b, &b->requests[i], &body);
    bs_put_request(b, b->o->endpoint, buf_view(&body), &c->out);
    buf_free(&body);
    b->n_running++;
    b->requests[i].start = os_now();
    if ((c->fd < 0 && !bs_connect(b, c)) || !bs_write(c)) {
        if (c->reused) {
            b->n_running--, bs_close(c), bs_start(b, i, true);
            return;
        }
        bs_end(b, c, strerror(errno));
    }
}

static void bs_on_chunk(bs_request *q, double now) {
    float gap = (float)(now - q->last);
    if (q->chunked) buf_put(&q->gaps, &gap, sizeof gap);
    else q->first = now, q->chunked = true;
    q->last = now;
}

/* A line of the event stream. */
static void bs_on_line(bs *b, bs_conn *c, str line, double now) {
    bs_request *q = &b->requests[c->request];
    arena a = {0};
    toka_err e;
    if (!str_starts(line, STR("data:"))) return;
    line = str_sub(line, line.n > 5 && line.p[5] == ' ' ? 6 : 5, line.n);
    if (str_is(line, "[DONE]")) {
        c->done = true;
        return;
    }
    const json *root = json_parse(&a, line, run_limits, &e), *choices = json_get(root, "choices"),
               *usage = json_get(root, "usage");
    const json *error = json_get(root, "error");
    if (json_is(choices, JSON_ARRAY) && choices->n) bs_on_chunk(q, now);
    if (json_is(usage, JSON_OBJECT)) {
        q->n_in = json_int(json_get(usage, "prompt_tokens"), q->n_in);
        q->n_out = json_int(json_get(usage, "completion_tokens"), q->n_out);
    }
    if (!root || json_is(error, JSON_OBJECT)) {
        str text = root ? json_str(json_get(error, "message")) : str_c(e.msg);
        if (!q->error) q->error = mem_check(strndup(text.p, text.n));
    }
    arena_free(&a);
}

/* Bytes of a body: lines of events, or the text of an error. False: more than we take. */
static bool bs_on_body(bs *b, bs_conn *c, str body, double now) {
    if (c->reply.status != 200) {
        buf_put(&c->line, body.p, MIN(body.n, (size_t)BS_HEAD_BYTES - MIN(c->line.n, (size_t)BS_HEAD_BYTES)));
        return true;
    }
    for (size_t used; body.n; body = str_sub(body, used, body.n)) {
        int got = bs_take_line(&c->line, body, BS_LINE_BYTES, &used);
        if (got < 0) return false;
        if (got) bs_on_line(b, c, buf_view(&c->line), now), buf_clear(&c->line);
    }
    return true;
}

/* The response is whole. */
static void bs_on_whole(bs *b, bs_conn *c) {
    bs_request *q = &b->requests[c->request];
    char why[400];
    snprintf(why, sizeof why, "HTTP status %d: %.*s", c->reply.status, STRF(buf_view(&c->line)));
    if (c->reply.status != 200) q->error = mem_check(strdup(why));
    else if (!q->error && (!q->chunked || !c->done)) q->error = mem_check(strdup("the stream ended early"));
    bs_end(b, c, NULL);
}

/* The connection broke before the answer was whole. One that had served before and says nothing at all was closed meanwhile. */
static void bs_on_broken(bs *b, bs_conn *c, const char *why) {
    int64_t i = c->request;
    bool again = c->reused && !c->reply.any;
    if (!again) {
        bs_end(b, c, why);
        return;
    }
    b->n_running--, bs_close(c), bs_start(b, i, true);
}

static void bs_drop_idle(bs *b, bs_conn *c) { /* closed by the server while nobody used it */
    bs_conn **at = &b->idle;
    while (*at && *at != c) at = &(*at)->next;
    if (*at) *at = c->next, bs_close(c);
}

static void bs_on_ready(bs *b, bs_conn *c, char *bytes, size_t room) {
    if (c->request >= 0 && !bs_write(c)) {
        bs_on_broken(b, c, strerror(errno));
        return;
    }
    for (;;) {
        ssize_t n = recv(c->fd, bytes, room, 0);
        if (n < 0 && (errno == EAGAIN || errno == ENOTCONN)) return;
        if (c->request < 0) { /* a byte nobody asked for, or the end */
            bs_drop_idle(b, c);
            return;
        }
        if (n == 0 && c->reply.state == BS_TO_CLOSE) c->reply.state = BS_WHOLE;
        else if (n <= 0) {
            bs_on_broken(b, c, n ? strerror(errno) : "the server closed the connection");
            return;
        }
        double now = os_now();
        str left = {bytes, (size_t)n}, body;
        while (left.n && c->reply.state != BS_WHOLE) {
            ptrdiff_t used = bs_reply_take(&c->reply, left, &body);
            if (used < 0 || !bs_on_body(b, c, body, now)) {
                bs_end(b, c, "not an HTTP response");
                return;
            }
            left = str_sub(left, (size_t)used, left.n);
        }
        if (c->reply.state == BS_WHOLE) {
            bs_on_whole(b, c);
            return;
        }
    }
}

/* ---- The run ---- */

static void bs_progress(const bs *b, double *shown) {
    double now = os_now();
    if (b->o->quiet || !isatty(2) || now - *shown < 0.25) return;
    *shown = now;
    fprintf(stderr, "\r%lld of %lld requests, %lld under way\x1b[K", (long long)b->n_ended, (long long)b->n,
            (long long)b->n_running);
}

/* Requests number `from` on, as they are due and as many at once as allowed, until all have ended. */
static int bs_run(bs *b, int64_t from, int64_t to, toka_err *e) {
    enum { EVENTS = 256, BYTES = 1 << 16 };
    struct epoll_event ready[EVENTS];
    char *bytes = mem_alloc(BYTES);
    int64_t most = b->o->max_concurrency ? b->o->max_concurrency : INT64_MAX;
    double shown = 0;
    int code = 0;
    b->next = from, b->n_ended = 0, b->t0 = os_now();
    while (b->n_ended < to - from && !*b->o->interrupted) {
        double now = os_now() - b->t0;
        while (b->next < to && b->n_running < most && b->requests[b->next].due <= now) bs_start(b, b->next++, false);
        double wait = b->next < to && b->n_running < most ? b->requests[b->next].due - (os_now() - b->t0) : 0.2;
        int n = epoll_wait(b->epoll, ready, EVENTS, (int)(1e3 * MAX(0.0, MIN(wait, 0.2))));
        if (n < 0 && errno != EINTR && (code = fail(e, TOKA_E_IO, "epoll_wait: %s", strerror(errno)))) break;
        for (int i = 0; i < n; i++) bs_on_ready(b, ready[i].data.ptr, bytes, BYTES);
        bs_progress(b, &shown);
    }
    b->end = os_now();
    if (shown > 0) fputs("\r\x1b[K", stderr);
    free(bytes);
    return *b->o->interrupted ? fail(e, TOKA_E_CANCELLED, "interrupted") : code;
}

/* ---- Figures ---- */

enum { BS_TTFT, BS_TPOT, BS_ITL, BS_E2EL, BS_METRICS, BS_MAX_PERCENTILES = 16 };
static const struct {
    const char *key, *name, *title;
} bs_metrics[BS_METRICS] = {{"ttft", "TTFT", "Time to First Token"},
                            {"tpot", "TPOT", "Time per Output Token (excl. 1st token)"},
                            {"itl", "ITL", "Inter-token Latency"},
                            {"e2el", "E2EL", "End-to-end Latency"}};

typedef struct bs_wanted { /* what the flags ask for */
    bool metric[BS_METRICS];
    double percentile[BS_MAX_PERCENTILES], limit_ms[BS_METRICS]; /* limit: of --goodput, INFINITY: none */
    int n_percentiles;
    bool goodput;
} bs_wanted;

typedef struct bs_series { /* values of one metric, seconds; sorted by bs_finish */
    double *v;
    size_t n, cap;
    double mean, std;
} bs_series;

typedef struct bs_result {
    double duration;
    int64_t completed, failed, good, n_in, n_out;
    double peak_rate;   /* chunks in the fullest second */
    int64_t peak_concurrent;
    bs_series series[BS_METRICS];
} bs_result;

static int bs_metric(str name) {
    for (int i = 0; i < BS_METRICS; i++)
        if (str_is(name, bs_metrics[i].key)) return i;
    return -1;
}

/* The next word of a list with commas or spaces between; false at its end. */
static bool bs_word(const char **p, str *word) {
    *p += strspn(*p, ", ");
    *word = (str){*p, strcspn(*p, ", ")};
    *p += word->n;
    return word->n > 0;
}

static int bs_read_wanted(const bs_options *o, bs_wanted *w, toka_err *e) {
    str word;
    *w = (bs_wanted){0};
    for (int i = 0; i < BS_METRICS; i++) w->limit_ms[i] = INFINITY;
    for (const char *p = o->metrics; bs_word(&p, &word);) {
        int i = bs_metric(word);
        if (i < 0) return fail(e, TOKA_E_USE, "--percentile-metrics: '%.*s', expected ttft, tpot, itl or e2el", STRF(word));
        w->metric[i] = true;
    }
    for (const char *p = o->percentiles; bs_word(&p, &word);) {
        char *end;
        double v = strtod(word.p, &end);
        if (end != word.p + word.n || !(v >= 0 && v <= 100) || w->n_percentiles == BS_MAX_PERCENTILES)
            return fail(e, TOKA_E_USE, "--metric-percentiles: '%s', expected at most %d numbers from 0 to 100", o->percentiles,
                        BS_MAX_PERCENTILES);
        w->percentile[w->n_percentiles++] = v;
    }
    for (const char *p = o->goodput ? o->goodput : ""; bs_word(&p, &word);) {
        ptrdiff_t colon = str_find(word, STR(":"), 0);
        int i = colon < 0 ? -1 : bs_metric(str_sub(word, 0, (size_t)colon));
        char *end = NULL;
        double v = i < 0 || i == BS_ITL ? -1 : strtod(word.p + colon + 1, &end);
        if (!(v >= 0) || end != word.p + word.n)
            return fail(e, TOKA_E_USE, "--goodput: '%.*s', expected ttft, tpot or e2el, a colon and milliseconds", STRF(word));
        w->limit_ms[i] = v, w->goodput = true;
    }
    return 0;
}

static void bs_put_value(bs_series *s, double v) {
    if (s->n == s->cap) s->cap = MAX((size_t)1024, 2 * s->cap), s->v = mem_realloc(s->v, s->cap * sizeof *s->v);
    s->v[s->n++] = v;
}

static void bs_finish(bs_series *s) {
    double sum = 0, squares = 0;
    for (size_t i = 0; i < s->n; i++) sum += s->v[i];
    s->mean = s->n ? sum / (double)s->n : 0;
    for (size_t i = 0; i < s->n; i++) squares += (s->v[i] - s->mean) * (s->v[i] - s->mean);
    s->std = s->n ? sqrt(squares / (double)s->n) : 0;
    if (s->n) qsort(s->v, s->n, sizeof *s->v, run_compare_doubles);
}

/* Interpolated between neighbours, as numpy does; 0 of nothing. */
static double bs_percentile(const bs_series *s, double percent) {
    if (!s->n) return 0;
    double at = percent / 100 * (double)(s->n - 1);
    size_t i = (size_t)at, next = MIN(i + 1, s->n - 1);
    return s->v[i] + (at - (double)i) * (s->v[next] - s->v[i]);
}

/* Chunks in the fullest second, seconds counted from the first start; most requests at one time. */
static void bs_peaks(const bs *b, bs_result *r) {
    bs_series starts = {0}, ends = {0};
    size_t seconds = (size_t)(b->end - b->t0) + 2;
    int64_t *per_second = mem_zalloc(seconds * sizeof *per_second), most = 0;
    for (int64_t i = 0; i < b->n; i++) {
        const bs_request *q = &b->requests[i];
        const float *gap = (const float *)(const void *)q->gaps.p;
        if (q->error) continue;
        double t = q->first - b->t0;
        for (size_t k = 0;; t += gap[k++]) {
            per_second[(size_t)MAX(0.0, MIN(t, (double)(seconds - 1)))]++;
            if (k == q->gaps.n / sizeof *gap) break;
        }
        bs_put_value(&starts, q->start), bs_put_value(&ends, q->last);
    }
    for (size_t s = 0; s < seconds; s++) most = MAX(most, per_second[s]);
    bs_finish(&starts), bs_finish(&ends);
    for (size_t i = 0, k = 0; i < starts.n; i++) { /* an end goes before a start of the same time */
        while (ends.v[k] <= starts.v[i]) k++;
        r->peak_concurrent = MAX(r->peak_concurrent, (int64_t)(i + 1 - k));
    }
    r->peak_rate = (double)most;
    free(per_second), free(starts.v), free(ends.v);
}

static void bs_measure(const bs *b, const bs_wanted *w, bs_result *r) {
    *r = (bs_result){.duration = b->end - b->t0};
    for (int64_t i = 0; i < b->n; i++) {
        const bs_request *q = &b->requests[i];
        const float *gap = (const float *)(const void *)q->gaps.p;
        if (q->error) {
            r->failed++;
            continue;
        }
        int64_t n_out = q->n_out ? q->n_out : (int64_t)(q->gaps.n / sizeof *gap) + 1;
        double value[BS_METRICS] = {[BS_TTFT] = q->first - q->start, [BS_E2EL] = q->last - q->start};
        if (n_out > 1) bs_put_value(&r->series[BS_TPOT], value[BS_TPOT] = (q->last - q->first) / (double)(n_out - 1));
        bs_put_value(&r->series[BS_TTFT], value[BS_TTFT]), bs_put_value(&r->series[BS_E2EL], value[BS_E2EL]);
        for (size_t k = 0; k < q->gaps.n / sizeof *gap; k++) bs_put_value(&r->series[BS_ITL], gap[k]);
        bool good = true;
        for (int k = 0; k < BS_METRICS; k++) good &= 1e3 * value[k] <= w->limit_ms[k];
        r->completed++, r->good += good, r->n_in += q->n_in, r->n_out += n_out;
    }
    bs_peaks(b, r);
    for (int k = 0; k < BS_METRICS; k++) bs_finish(&r->series[k]);
}

static void bs_title(const char *title, char line) { /* in the middle of 50 characters */
    int n = (int)strlen(title), left = (50 - n) / 2;
    for (int i = 0; i < 50; i++) putchar(i < left || i >= left + n ? line : title[i - left]);
    putchar('\n');
}

static void bs_print(const bs_options *o, const bs_wanted *w, const bs_result *r) {
    const double s = r->duration;
    const char *row = "%-40s %-10.2f\n", *whole = "%-40s %-10lld\n";
    bs_title(" Serving Benchmark Result ", '=');
    printf(whole, "Successful requests:", (long long)r->completed);
    printf(whole, "Failed requests:", (long long)r->failed);
    if (o->max_concurrency) printf(whole, "Maximum request concurrency:", (long long)o->max_concurrency);
    if (isfinite(o->request_rate)) printf(row, "Request rate configured (RPS):", o->request_rate);
    printf(row, "Benchmark duration (s):", s);
    printf(whole, "Total input tokens:", (long long)r->n_in);
    printf(whole, "Total generated tokens:", (long long)r->n_out);
    printf(row, "Request throughput (req/s):", (double)r->completed / s);
    if (w->goodput) printf(row, "Request goodput (req/s):", (double)r->good / s);
    printf(row, "Output token throughput (tok/s):", (double)r->n_out / s);
    printf(row, "Peak output token throughput (tok/s):", r->peak_rate);
    printf(row, "Peak concurrent requests:", (double)r->peak_concurrent);
    printf(row, "Total token throughput (tok/s):", (double)(r->n_in + r->n_out) / s);
    for (int k = 0; k < BS_METRICS; k++) {
        char name[64];
        if (!w->metric[k]) continue;
        bs_title(bs_metrics[k].title, '-');
        snprintf(name, sizeof name, "Mean %s (ms):", bs_metrics[k].name);
        printf(row, name, 1e3 * r->series[k].mean);
        snprintf(name, sizeof name, "Median %s (ms):", bs_metrics[k].name);
        printf(row, name, 1e3 * bs_percentile(&r->series[k], 50));
        for (int i = 0; i < w->n_percentiles; i++) {
            snprintf(name, sizeof name, "P%g %s (ms):", w->percentile[i], bs_metrics[k].name);
            printf(row, name, 1e3 * bs_percentile(&r->series[k], w->percentile[i]));
        }
    }
    bs_title("", '=');
}

static void bs_put_figure(buf *out, const char *name, double v) { json_put_key(out, name), json_put_num(out, v, false); }

/* Arrays with an element for each request, in the order of the dataset; times in seconds. */
static void bs_put_details(const bs *b, buf *out) {
    buf list[7] = {{0}};
    static const char *const names[COUNT(list)] = {"input_lens", "output_lens", "ttfts", "itls",
                                                   "latencies",  "start_times", "errors"};
    for (int64_t i = 0; i < b->n; i++) {
        const bs_request *q = &b->requests[i];
        size_t n_gaps = q->gaps.n / sizeof(float);
        json_put_int(&list[0], q->n_in);
        json_put_int(&list[1], q->error ? 0 : q->n_out ? q->n_out : (int64_t)n_gaps + 1);
        json_put_num(&list[2], q->chunked ? q->first - q->start : 0, false);
        json_put_open(&list[3], '[');
        for (size_t k = 0; k < n_gaps; k++) json_put_num(&list[3], ((const float *)(const void *)q->gaps.p)[k], true);
        json_put_close(&list[3], ']');
        json_put_num(&list[4], q->chunked ? q->last - q->start : 0, false);
        json_put_num(&list[5], q->start, false);
        json_put_str(&list[6], str_c(q->error ? q->error : ""));
    }
    for (int k = 0; k < COUNT(list); k++) {
        json_put_key(out, names[k]);
        json_put_open(out, '['), buf_str(out, buf_view(&list[k])), json_put_close(out, ']');
        buf_free(&list[k]);
    }
}

static void bs_print_json(const bs *b, const bs_wanted *w, const bs_result *r) {
    const bs_options *o = b->o;
    buf out = {0};
    json_put_open(&out, '{');
    json_put_key(&out, "model_id"), json_put_str(&out, str_c(b->model));
    json_put_key(&out, "num_prompts"), json_put_int(&out, b->n);
    json_put_key(&out, "request_rate");
    if (isfinite(o->request_rate)) json_put_num(&out, o->request_rate, false);
    else json_put_str(&out, STR("inf"));
    bs_put_figure(&out, "burstiness", o->burstiness);
    json_put_key(&out, "max_concurrency");
    if (o->max_concurrency) json_put_int(&out, o->max_concurrency);
    else json_put_null(&out);
    bs_put_figure(&out, "duration", r->duration);
    const struct { const char *name; int64_t v; } counts[] = {{"completed", r->completed}, {"failed", r->failed},
        {"total_input_tokens", r->n_in}, {"total_output_tokens", r->n_out}, {"max_concurrent_requests", r->peak_concurrent}};
    for (int i = 0; i < COUNT(counts); i++) json_put_key(&out, counts[i].name), json_put_int(&out, counts[i].v);
    bs_put_figure(&out, "request_throughput", (double)r->completed / r->duration);
    bs_put_figure(&out, "request_goodput", w->goodput ? (double)r->good / r->duration : NAN); /* null without --goodput */
    bs_put_figure(&out, "output_throughput", (double)r->n_out / r->duration);
    bs_put_figure(&out, "total_token_throughput", (double)(r->n_in + r->n_out) / r->duration);
    bs_put_figure(&out, "max_output_tokens_per_s", r->peak_rate);
    for (int k = 0; k < BS_METRICS; k++) {
        char name[64];
        if (!w->metric[k]) continue;
        const bs_series *v = &r->series[k];
        snprintf(name, sizeof name, "mean_%s_ms", bs_metrics[k].key), bs_put_figure(&out, name, 1e3 * v->mean);
        snprintf(name, sizeof name, "median_%s_ms", bs_metrics[k].key), bs_put_figure(&out, name, 1e3 * bs_percentile(v, 50));
        snprintf(name, sizeof name, "std_%s_ms", bs_metrics[k].key), bs_put_figure(&out, name, 1e3 * v->std);
        for (int i = 0; i < w->n_percentiles; i++) {
            snprintf(name, sizeof name, "p%g_%s_ms", w->percentile[i], bs_metrics[k].key);
            bs_put_figure(&out, name, 1e3 * bs_percentile(v, w->percentile[i]));
        }
    }
    if (o->detailed) bs_put_details(b, &out);
    json_put_close(&out, '}');
    printf("%s\n", out.p);
    buf_free(&out);
}

/* ---- toka bench serve ---- */

static int bs_check(const bs_options *o, toka_err *e) {
    if (!(o->request_rate > 0)) return fail(e, TOKA_E_USE, "--request-rate: %g, expected more than 0", o->request_rate);
    if (!(o->burstiness > 0)) return fail(e, TOKA_E_USE, "--burstiness: %g, expected more than 0", o->burstiness);
    if (o->max_concurrency < 0 || o->num_prompts < 0 || o->num_warmups < 0 || o->ready_s < 0)
        return fail(e, TOKA_E_USE,
                    "--max-concurrency, --num-prompts, --num-warmups, --ready-check-timeout-sec: expected 0 or more");
    if (*o->endpoint != '/') return fail(e, TOKA_E_USE, "--endpoint: '%s', expected a path, as /v1/completions", o->endpoint);
    return 0;
}

/* The members of --extra-body, without its braces, borrowed from it. */
static int bs_read_extra(bs *b, toka_err *e) {
    arena a = {0};
    toka_err why;
    str text = str_c(b->o->extra_body ? b->o->extra_body : "{}");
    const json *root = json_parse(&a, text, run_limits, &why);
    bool good = json_is(root, JSON_OBJECT), any = good && root->n;
    arena_free(&a);
    if (!good) return fail(e, TOKA_E_USE, "--extra-body: expected a JSON object");
    while (text.p[0] != '{') text = str_sub(text, 1, text.n);
    while (text.p[text.n - 1] != '}') text.n--;
    if (any) b->extra = str_sub(text, 1, text.n - 1);
    return 0;
}

static int bs_warm_up(bs *b, toka_err *e) { /* the first prompt, as often as asked for; it fails with the first that failed */
    int64_t n = b->n;
    bs_request first = b->requests[0];
    for (int i = 0; i < b->o->num_warmups; i++) *bs_add(b, 0) = first;
    b->n = n;
    int code = bs_run(b, n, n + b->o->num_warmups, e);
    for (int64_t i = n; i < n + b->o->num_warmups; i++) {
        bs_request *q = &b->requests[i];
        if (q->error && !code) code = fail(e, TOKA_E_IO, "warm-up: %s", q->error);
        buf_free(&q->gaps), free(q->error);
    }
    return code;
}

static int bs_prepare(bs *b, toka_err *e) {
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) /* a connection is a file */
        files.rlim_cur = files.rlim_max, setrlimit(RLIMIT_NOFILE, &files);
    b->key = getenv("OPENAI_API_KEY");
    if (b->key && (!*b->key || strpbrk(b->key, "\r\n"))) b->key = NULL;
    b->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (b->epoll < 0) return fail(e, TOKA_E_IO, "epoll_create1: %s", strerror(errno));
    int code = bs_check(b->o, e);
    if (!code) code = bs_read_extra(b, e);
    if (!code) code = bs_resolve(b, e);
    if (!code) code = bs_wait_ready(b, e);
    if (!code) code = b->o->dataset ? bs_load(b, e) : bs_random_prompts(b, e);
    if (!code && b->n > INT_MAX / 2) code = fail(e, TOKA_E_USE, "%lld requests, expected fewer", (long long)b->n);
    if (!code) bs_draw_times(b);
    return code;
}

static void bs_tell_failures(const bs *b) {
    int told = 0;
    for (int64_t i = 0; i < b->n && told < 10; i++)
        if (b->requests[i].error)
            fprintf(stderr, "toka bench: request %lld failed: %s\n", (long long)i, b->requests[i].error), told++;
}

/* Prints the figures to standard output. Fails if the server could not be measured at all: nothing succeeded. */
static int bs_bench(const bs_options *o, toka_err *e) {
    bs b = {.o = o, .epoll = -1};
    bs_wanted w;
    bs_result r = {0};
    int code = bs_read_wanted(o, &w, e);
    if (!code) code = bs_prepare(&b, e);
    if (!code && o->num_warmups) code = bs_warm_up(&b, e);
    if (!code) code = bs_run(&b, 0, b.n, e);
    if (!code) {
        bs_measure(&b, &w, &r);
        bs_tell_failures(&b);
        if (o->json) bs_print_json(&b, &w, &r);
        else bs_print(o, &w, &r);
        if (!r.completed) code = fail(e, TOKA_E_IO, "all %lld requests failed", (long long)b.n);
    }
    while (b.idle) {
        bs_conn *c = b.idle;
        b.idle = c->next, bs_close(c);
    }
    for (int64_t i = 0; i < b.n; i++) buf_free(&b.requests[i].gaps), free(b.requests[i].error);
    for (int k = 0; k < BS_METRICS; k++) free(r.series[k].v);
    if (b.epoll >= 0) close(b.epoll);
    free(b.requests), ids_free(&b.tokens), ids_free(&b.vocabulary), buf_free(&b.texts);
    return code;
}

/* ===========================================================================
 * MARK: 29. Command line [os]
 * toka [COMMAND] [FLAGS]. Flags are one table (cli_flags): name, short form, environment name (TOKA_ and the flag's name in
 * capitals), help group, type and the field they fill. Results go to standard output, everything else to standard error. This
 * chapter alone prints and decides the exit status: 0 done, 1 bad use or bad input, 2 device or I/O failure, 130 after Ctrl-C.
 * =========================================================================== */

enum { CLI_MAX_LIST = 16, CLI_MAX_INPUT = 1 << 30 };

typedef struct cli_list { /* values of a flag that may be given several times */
    const char *at[CLI_MAX_LIST];
    int n;
} cli_list;

typedef struct cli { /* what the command line says */
    toka_options open;
    const char *prompt, *file, *system, *now;
    int samples, max_tokens, min_tokens, top_k, logprobs;
    double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty; /* NAN: not given */
    int64_t seed;
    cli_list stop;
    bool include_stop, ignore_eos, raw, chat, json, quiet, decode, no_special, help, version;
    const char *input, *output, *report, *dataset;
    int num_prompts;
    bool dummy_weights;
    const char *host, *request_rate;
    int port;
    bs_options bench; /* of bench serve; the shared fields are filled in cli_bench_serve */
    srv_options serve; /* of serve; likewise */
    cli_list api_keys, served_names;
    const char *api_key_file, *generation_config;
    plan_options plan; /* of plan; likewise */
} cli;

enum cli_type { CLI_BOOL, CLI_INT, CLI_INT64, CLI_FLOAT, CLI_TEXT, CLI_LIST };

typedef struct cli_flag {
    const char *name, *brief; /* "max-tokens", "n" or "" */
    const char *arg;          /* name of the value in --help, "" for a switch */
    enum cli_type type;
    size_t field;      /* offset in cli */
    unsigned commands; /* that take it */
    const char *help;
} cli_flag;

enum { FOR_RUN = 1, FOR_TOKENIZE = 2, FOR_TEMPLATE = 4, FOR_SCORE = 8, FOR_MODELS = 16, FOR_BATCH = 32, FOR_THROUGHPUT = 64,
       FOR_BENCH_PLAN = 128, FOR_SERVE = 256, FOR_BENCH_SERVE = 512, FOR_DEVICES = 1024, FOR_OPS = 2048, FOR_PLAN = 4096, FOR_ANY = 8191,
       FOR_OPENS = FOR_RUN | FOR_SCORE | FOR_BATCH | FOR_THROUGHPUT | FOR_SERVE,
       FOR_SAMPLES = FOR_RUN | FOR_BATCH | FOR_THROUGHPUT, FOR_READS = FOR_RUN | FOR_SCORE | FOR_TOKENIZE | FOR_TEMPLATE };

#define AT(field) offsetof(cli, field)
static const cli_flag cli_flags[] = {
    /* a row with field name NULL opens a group of --help */
    {NULL, NULL, NULL, 0, 0, 0, "Model"},
    {"model", "m", "MODEL", CLI_TEXT, AT(open.model), FOR_OPENS | FOR_TOKENIZE | FOR_TEMPLATE | FOR_BENCH_SERVE | FOR_PLAN,
     "folder, hub id in the local cache, or a name of models.txt (default: embedded); bench serve: the server's name for it"},
    {"models-file", "", "FILE", CLI_TEXT, AT(open.models_file), FOR_OPENS | FOR_TOKENIZE | FOR_TEMPLATE | FOR_MODELS | FOR_PLAN,
     "the list of known models (default: models.txt beside toka or here)"},
    {"chat-template", "", "FILE", CLI_TEXT, AT(open.chat_template), FOR_RUN | FOR_TEMPLATE | FOR_BATCH | FOR_SERVE,
     "Jinja template instead of the model's own"},
    {"device", "", "NAME", CLI_TEXT, AT(open.device), FOR_OPENS, "auto, cpu or cuda; auto takes a GPU if there is one"},
    {"gpu-memory-utilization", "", "X", CLI_FLOAT, AT(open.gpu_memory_utilization), FOR_OPENS | FOR_PLAN,
     "share of the GPU's free memory to take (default: 0.9)"},
    {"threads", "t", "N", CLI_INT, AT(open.n_threads), FOR_OPENS, "CPU threads (default: one a core)"},
    {"tensor-parallel-size", "", "N", CLI_INT, AT(open.tensor_parallel_size), FOR_OPENS,
     "devices that share each layer's heads, columns and the vocabulary (default: 1)"},
    {"pipeline-parallel-size", "", "N", CLI_INT, AT(open.pipeline_parallel_size), FOR_OPENS,
     "stages of layers, each on devices of its own (default: 1)"},
    {"data-parallel-size", "", "N", CLI_INT, AT(open.data_parallel_size), FOR_OPENS,
     "replicas of the model, each with its own KV cache and its own max-num-seqs (default: 1)"},
    {"max-model-len", "", "N", CLI_INT, AT(open.max_model_len), FOR_OPENS | FOR_PLAN,
     "longest sequence in tokens (default: the model's, as memory allows)"},
    {"max-num-seqs", "", "N", CLI_INT, AT(open.max_num_seqs), FOR_OPENS | FOR_PLAN,
     "most samples running at once (default: 256, on a GPU 4096)"},
    {"kv-tokens", "", "N", CLI_INT64, AT(open.kv_tokens), FOR_OPENS,
     "size of the KV cache in tokens (default: as memory allows)"},
    {"max-num-batched-tokens", "", "N", CLI_INT, AT(open.max_num_batched_tokens), FOR_OPENS | FOR_PLAN,
     "most tokens in one step (default: 512, on a GPU 8448)"},
    {"no-enable-prefix-caching", "", "", CLI_BOOL, AT(open.no_prefix_caching), FOR_OPENS,
     "every sample computes and keeps its whole prompt by itself; to measure what sharing saves"},
    {NULL, NULL, NULL, 0, 0, 0, "Prompt"},
    {"prompt", "p", "TEXT", CLI_TEXT, AT(prompt), FOR_READS, "the prompt (default: standard input)"},
    {"file", "f", "FILE", CLI_TEXT, AT(file), FOR_READS, "read the prompt from a file"},
    {"system", "", "TEXT", CLI_TEXT, AT(system), FOR_RUN, "system message for the chat template"},
    {"raw", "", "", CLI_BOOL, AT(raw), FOR_RUN, "complete the text as it is, without the chat template"},
    {"chat", "", "", CLI_BOOL, AT(chat), FOR_RUN, "a conversation with history, one line a turn"},
    {"now", "", "TIME", CLI_TEXT, AT(now), FOR_RUN | FOR_TEMPLATE | FOR_BATCH | FOR_SERVE,
     "the template's clock, 'YYYY-MM-DD hh:mm:ss' (default: local time)"},
    {NULL, NULL, NULL, 0, 0, 0, "Sampling (defaults: the model's generation_config, else greedy)"},
    {"max-tokens", "n", "N", CLI_INT, AT(max_tokens), FOR_RUN | FOR_BATCH,
     "output tokens at most, and what the model's length leaves (default: up to that)"},
    {"min-tokens", "", "N", CLI_INT, AT(min_tokens), FOR_RUN | FOR_BATCH, "do not end before N tokens"},
    {"samples", "", "N", CLI_INT, AT(samples), FOR_RUN | FOR_BATCH | FOR_PLAN, "answers to the one prompt (default: 1)"},
    {"temp", "", "T", CLI_FLOAT, AT(temperature), FOR_SAMPLES | FOR_BENCH_SERVE, "temperature; 0 is greedy"},
    {"top-p", "", "P", CLI_FLOAT, AT(top_p), FOR_SAMPLES, "keep the most likely tokens that add up to P"},
    {"top-k", "", "K", CLI_INT, AT(top_k), FOR_SAMPLES, "keep the K most likely tokens; 0 is off"},
    {"min-p", "", "P", CLI_FLOAT, AT(min_p), FOR_SAMPLES, "keep tokens at least P times as likely as the likeliest"},
    {"repetition-penalty", "", "R", CLI_FLOAT, AT(repetition_penalty), FOR_SAMPLES, "over prompt and output; 1 is off"},
    {"presence-penalty", "", "X", CLI_FLOAT, AT(presence_penalty), FOR_SAMPLES,
     "taken from tokens already in the output; 0 is off"},
    {"frequency-penalty", "", "X", CLI_FLOAT, AT(frequency_penalty), FOR_SAMPLES, "the same, for each time they occurred"},
    {"seed", "", "N", CLI_INT64, AT(seed), FOR_SAMPLES | FOR_BENCH_SERVE, "same seed, same text (default: 0)"},
    {"stop", "", "TEXT", CLI_LIST, AT(stop), FOR_RUN | FOR_BATCH, "end before this text; may be given up to 16 times"},
    {"include-stop", "", "", CLI_BOOL, AT(include_stop), FOR_RUN | FOR_BATCH, "the stop text stays in the output"},
    {"ignore-eos", "", "", CLI_BOOL, AT(ignore_eos), FOR_RUN | FOR_BATCH | FOR_BENCH_SERVE, "go on past the end-of-sequence token"},
    {NULL, NULL, NULL, 0, 0, 0, "Batch (the sampling flags are defaults for lines that do not say)"},
    {"input-file", "i", "FILE", CLI_TEXT, AT(input), FOR_BATCH, "requests, one JSON object a line; - is standard input"},
    {"output-file", "o", "FILE", CLI_TEXT, AT(output), FOR_BATCH,
     "results, appended as they come; what is there is not done again"},
    {"report", "", "FILE", CLI_TEXT, AT(report), FOR_BATCH, "the closing report as a JSON object"},
    {NULL, NULL, NULL, 0, 0, 0, "Bench"},
    {"dataset", "", "FILE", CLI_TEXT, AT(dataset), FOR_THROUGHPUT | FOR_BENCH_SERVE,
     "lines with prompt_token_ids or prompt, and output_lengths: a sample for each"},
    {"num-prompts", "", "N", CLI_INT, AT(num_prompts), FOR_THROUGHPUT | FOR_BENCH_SERVE,
     "only the first N lines; bench serve without a dataset: so many requests (default: 1000)"},
    {"dummy-weights", "", "", CLI_BOOL, AT(dummy_weights), FOR_THROUGHPUT,
     "random weights in the shapes of -m NAME, a name of models.txt"},
    {NULL, NULL, NULL, 0, 0, 0, "Bench serve (a key for the server is taken from OPENAI_API_KEY)"},
    {"base-url", "", "URL", CLI_TEXT, AT(bench.base_url), FOR_BENCH_SERVE, "http://HOST:PORT instead of --host and --port"},
    {"endpoint", "", "PATH", CLI_TEXT, AT(bench.endpoint), FOR_BENCH_SERVE,
     "/v1/completions (default) or /v1/chat/completions"},
    {"random-input-len", "", "N", CLI_INT, AT(bench.input_len), FOR_BENCH_SERVE,
     "without a dataset: tokens of a random prompt (default: 1024)"},
    {"random-output-len", "", "N", CLI_INT, AT(bench.output_len), FOR_BENCH_SERVE,
     "tokens of an answer at most, where the dataset does not say (default: 128)"},
    {"random-range-ratio", "", "R", CLI_FLOAT, AT(bench.range_ratio), FOR_BENCH_SERVE,
     "both lengths are drawn between 1 - R and 1 + R times theirs (default: 0)"},
    {"random-prefix-len", "", "N", CLI_INT, AT(bench.prefix_len), FOR_BENCH_SERVE,
     "tokens before the random ones that are equal in all prompts (default: 0)"},
    {"request-rate", "", "R", CLI_TEXT, AT(request_rate), FOR_BENCH_SERVE, "requests a second (default: inf, all at once)"},
    {"burstiness", "", "X", CLI_FLOAT, AT(bench.burstiness), FOR_BENCH_SERVE,
     "shape of the gaps' gamma distribution; 1 is a Poisson process (default), more is steadier"},
    {"max-concurrency", "", "N", CLI_INT, AT(bench.max_concurrency), FOR_BENCH_SERVE,
     "most requests under way at once (default: no limit)"},
    {"num-warmups", "", "N", CLI_INT, AT(bench.num_warmups), FOR_BENCH_SERVE, "the first prompt N times before the clock starts"},
    {"ready-check-timeout-sec", "", "N", CLI_INT, AT(bench.ready_s), FOR_BENCH_SERVE,
     "how long to wait for the server to be there (default: 60)"},
    {"extra-body", "", "JSON", CLI_TEXT, AT(bench.extra_body), FOR_BENCH_SERVE, "an object whose members go into every request"},
    {"goodput", "", "LIST", CLI_TEXT, AT(bench.goodput), FOR_BENCH_SERVE,
     "count requests that keep all of these: 'ttft:200 tpot:50 e2el:3000', in ms"},
    {"percentile-metrics", "", "LIST", CLI_TEXT, AT(bench.metrics), FOR_BENCH_SERVE,
     "which blocks to print (default: ttft,tpot,itl,e2el)"},
    {"metric-percentiles", "", "LIST", CLI_TEXT, AT(bench.percentiles), FOR_BENCH_SERVE, "percentiles in them (default: 99)"},
    {"save-detailed", "", "", CLI_BOOL, AT(bench.detailed), FOR_BENCH_SERVE, "with --json: arrays with the figures of each request"},
    {NULL, NULL, NULL, 0, 0, 0, "Server"},
    {"host", "", "ADDRESS", CLI_TEXT, AT(host), FOR_SERVE | FOR_BENCH_SERVE,
     "address the server listens on or is found at (default: 127.0.0.1)"},
    {"port", "", "N", CLI_INT, AT(port), FOR_SERVE | FOR_BENCH_SERVE, "its port (default: 10210); serve: 0 is any free one"},
    {"uds", "", "PATH", CLI_TEXT, AT(serve.uds), FOR_SERVE, "listen on a unix socket instead"},
    {"api-key", "", "KEY", CLI_LIST, AT(api_keys), FOR_SERVE,
     "clients must send one of these keys; up to 16 times (others can read a command line: better TOKA_API_KEY or a file)"},
    {"api-key-file", "", "FILE", CLI_TEXT, AT(api_key_file), FOR_SERVE, "more keys, one a line"},
    {"served-model-name", "", "NAME", CLI_LIST, AT(served_names), FOR_SERVE,
     "what clients call the model (default: its own name); up to 16 times, the first is told"},
    {"allowed-origins", "", "LIST", CLI_TEXT, AT(serve.origins), FOR_SERVE,
     "web origins that browsers may come from, with commas, or * (default: none)"},
    {"generation-config", "", "WHICH", CLI_TEXT, AT(generation_config), FOR_SERVE,
     "sampling defaults: auto, the model's generation_config, or vllm, none (default: auto)"},
    {"strict", "", "", CLI_BOOL, AT(serve.strict), FOR_SERVE, "refuse requests with unknown fields instead of ignoring those"},
    {"max-queue", "", "N", CLI_INT, AT(serve.max_queue), FOR_SERVE,
     "requests that may wait for their first token, more get a 429 (default: 65536)"},
    {"max-body-bytes", "", "N", CLI_INT64, AT(serve.max_body_bytes), FOR_SERVE, "longest request (default: 64 MiB)"},
    {"files-dir", "", "DIR", CLI_TEXT, AT(serve.files_dir), FOR_SERVE,
     "where files and batches are kept; off: nowhere (default: $XDG_DATA_HOME/toka/files or ~/.local/share/toka/files)"},
    {"max-upload-bytes", "", "N", CLI_INT64, AT(serve.max_upload_bytes), FOR_SERVE, "longest file (default: 2 GiB)"},
    {"read-timeout", "", "S", CLI_FLOAT, AT(serve.read_timeout), FOR_SERVE, "seconds for a request to arrive (default: 30)"},
    {"write-timeout", "", "S", CLI_FLOAT, AT(serve.write_timeout), FOR_SERVE,
     "seconds without a byte taken before a client is dropped (default: 60)"},
    {"keep-alive", "", "S", CLI_FLOAT, AT(serve.keep_alive), FOR_SERVE, "seconds between requests of a connection (default: 75)"},
    {"step-timeout", "", "S", CLI_FLOAT, AT(serve.step_timeout), FOR_SERVE,
     "seconds without a step, while there is work, until /health says that the engine hangs (default: 120)"},
    {"server-threads", "", "N", CLI_INT, AT(serve.n_workers), FOR_SERVE,
     "threads that tokenize requests and write answers (default: 2 to 8, by cores)"},
    {NULL, NULL, NULL, 0, 0, 0, "Plan"},
    {"gpus", "", "N", CLI_INT, AT(plan.gpus), FOR_PLAN, "how many GPUs of one host (default: 1)"},
    {"gpu", "", "NAME", CLI_TEXT, AT(plan.gpu), FOR_PLAN,
     "B200, H200, H100, A100-80G, A100-40G, L40S, L4, A10, RTX-4090 or RTX-3090 (default: H100)"},
    {"input-len", "", "N", CLI_INT, AT(plan.input), FOR_PLAN, "tokens of a prompt (default: 715, a GSM8K problem with four examples)"},
    {"output-len", "", "N", CLI_INT, AT(plan.output), FOR_PLAN, "tokens of an answer (default: 150)"},
    {NULL, NULL, NULL, 0, 0, 0, "Output"},
    {"logprobs", "", "K", CLI_INT, AT(logprobs), FOR_RUN, "log-probability of each token, and of the K best"},
    {"json", "", "", CLI_BOOL, AT(json), FOR_RUN | FOR_SCORE | FOR_THROUGHPUT | FOR_BENCH_PLAN | FOR_PLAN | FOR_BENCH_SERVE | FOR_OPS,
     "one JSON object instead of text"},
    {"quiet", "q", "", CLI_BOOL, AT(quiet), FOR_OPENS | FOR_BENCH_SERVE, "no last line on standard error"},
    {"decode", "", "", CLI_BOOL, AT(decode), FOR_TOKENIZE, "tokenize: ids on standard input, text on standard output"},
    {"no-special", "", "", CLI_BOOL, AT(no_special), FOR_TOKENIZE | FOR_SCORE,
     "tokenize, score: do not add special tokens; with --decode: leave them out"},
    {"help", "h", "", CLI_BOOL, AT(help), FOR_ANY, "this page"},
    {"version", "", "", CLI_BOOL, AT(version), FOR_ANY, "version and build"},
};

static cli cli_default(void) {
    return (cli){.open = toka_options_default(), .samples = 1, .top_k = INT_MIN, .logprobs = INT_MIN, .temperature = NAN, .top_p = NAN,
                 .min_p = NAN, .repetition_penalty = NAN, .presence_penalty = NAN, .frequency_penalty = NAN, .host = "127.0.0.1", .port = 10210,
                 .bench = {.endpoint = "/v1/completions", .input_len = 1024, .output_len = 128, .burstiness = 1, .ready_s = 60,
                           .metrics = "ttft,tpot,itl,e2el", .percentiles = "99"},
                 .generation_config = "auto",
                 .plan = {.gpu = "H100", .gpus = 1, .input = 715, .output = 150},
                 .serve = {.max_queue = 65536, .max_body_bytes = 64 << 20, .max_upload_bytes = (int64_t)2 << 30, .read_timeout = 30,
                           .write_timeout = 60, .keep_alive = 75, .step_timeout = 120}};
}

/* ---- Output: the first failed write to standard output ends the program with one sentence ---- */

static atomic_int cli_interrupted; /* signals so far; lock-free, so a handler may count them */

static void cli_on_signal(int sig) { (void)sig, cli_interrupted++; }

/* Weights are read where the file is mapped: one that is cut short under us, or whose disk fails, shows here. */
static void cli_on_lost_page(int sig, siginfo_t *info, void *context) {
    static const char why[] = "toka: a file of the model can no longer be read: it was cut short, or its disk failed\n";
    (void)sig, (void)context;
    if (info->si_code != BUS_ADRERR && info->si_code != BUS_OBJERR) return; /* a bug: again, and without this handler */
    ssize_t unused = write(2, why, sizeof why - 1);
    (void)unused;
    _exit(2);
}

static void cli_catch_signals(void) { /* the first Ctrl-C ends the text cleanly, the second ends the program */
    struct sigaction a = {.sa_handler = cli_on_signal, .sa_flags = (int)SA_RESETHAND};
    struct sigaction bus = {.sa_sigaction = cli_on_lost_page, .sa_flags = (int)(SA_RESETHAND | SA_SIGINFO)};
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
    sigaction(SIGBUS, &bus, NULL);
    signal(SIGPIPE, SIG_IGN), signal(SIGXFSZ, SIG_IGN); /* a failed write says so itself */
}

static int cli_write(str s, toka_err *e) {
    if (fwrite(s.p, 1, s.n, stdout) == s.n && fflush(stdout) == 0) return 0;
    return fail(e, TOKA_E_IO, "standard output: %s", strerror(errno));
}

/* ---- Help ---- */

static const char cli_commands[] =
    "Commands\n"
    "  toka [FLAGS]            complete a prompt, text streams to standard output\n"
    "  toka tokenize [FLAGS]   text on standard input to ids, or back with --decode\n"
    "  toka template [FLAGS]   JSON object with messages, tools ... on standard input to the rendered prompt\n"
    "  toka score [FLAGS]      log-probability of every token of a text\n"
    "  toka serve [FLAGS]      OpenAI-compatible server; SIGTERM lets it finish what is under way\n"
    "  toka models             the models of models.txt\n"
    "  toka devices            what this machine can run on\n"
    "  toka batch -i IN -o OUT a file of requests to a file of results; the same command goes on where it stopped\n"
    "  toka plan [FLAGS]       what of a model fits on which GPUs, how to split it, what that could reach at best; needs no GPU\n"
    "  toka bench throughput   time a dataset, each sample forced to its length; prints what vllm bench throughput prints\n"
    "  toka bench serve        measure a server: request rate, concurrency, latencies; prints what vllm bench serve prints\n"
    "  toka bench plan         time the scheduler's own work in a step of 8,192 sequences, without a model (not: toka plan)\n"
    "  toka bench ops          time every kernel of the GPU at the shapes of known models\n";

static int cli_help(toka_err *e) {
    printf("toka %s - a high-throughput LLM inference engine in one C file\n\n%s", TOKA_VERSION, cli_commands);
    for (int i = 0; i < COUNT(cli_flags); i++) {
        const cli_flag *f = &cli_flags[i];
        char left[64];
        if (!f->name) {
            printf("\n%s\n", f->help);
            continue;
        }
        snprintf(left, sizeof left, "%s%s%s--%s%s%s", *f->brief ? "-" : "    ", f->brief, *f->brief ? ", " : "", f->name,
                 *f->arg ? " " : "", f->arg);
        printf("  %-32s %s\n", left, f->help);
    }
    puts("\nEvery flag that takes a value can also come from the environment: TOKA_MAX_TOKENS=64 is --max-tokens 64.\n"
         "Exit status: 0 done, 1 bad use or bad input, 2 device or I/O failure, 130 after Ctrl-C.");
    return cli_write(STR(""), e);
}

/* ---- Reading flags ---- */

static int cli_set(cli *c, const cli_flag *f, const char *value, const char *shown, toka_err *e) {
    char *field = (char *)c + f->field, *end = NULL;
    errno = 0;
    switch (f->type) {
    case CLI_BOOL: *(bool *)(void *)field = true; return 0;
    case CLI_TEXT: memcpy(field, &value, sizeof value); return 0;
    case CLI_LIST: {
        cli_list *list = (cli_list *)(void *)field;
        if (list->n == CLI_MAX_LIST) return fail(e, TOKA_E_USE, "%s: given more than %d times", shown, CLI_MAX_LIST);
        list->at[list->n++] = value;
        return 0;
    }
    case CLI_FLOAT: {
        double v = strtod(value, &end);
        if (end == value || *end || !isfinite(v)) return fail(e, TOKA_E_USE, "%s: '%s' is not a number", shown, value);
        memcpy(field, &v, sizeof v);
        return 0;
    }
    case CLI_INT: case CLI_INT64: {
        long long v = strtoll(value, &end, 10);
        bool small = f->type == CLI_INT64 || (v >= INT_MIN && v <= INT_MAX);
        if (end == value || *end || errno || !small) return fail(e, TOKA_E_USE, "%s: '%s' is not a whole number", shown, value);
        if (f->type == CLI_INT) *(int *)(void *)field = (int)v;
        else *(int64_t *)(void *)field = v;
    }
    }
    return 0;
}

/* TOKA_MAX_TOKENS for --max-tokens. Switches, and flags of other commands, are not read from the environment. */
static int cli_environment(cli *c, unsigned command, toka_err *e) {
    for (int i = 0; i < COUNT(cli_flags); i++) {
        const cli_flag *f = &cli_flags[i];
        char name[64] = "TOKA_";
        if (!f->name || f->type == CLI_BOOL || !(f->commands & command)) continue;
        for (size_t k = 0; k <= strlen(f->name); k++)
            name[5 + k] = f->name[k] == '-' ? '_' : (char)toupper((unsigned char)f->name[k]);
        const char *value = getenv(name);
        int code = value && *value ? cli_set(c, f, value, name, e) : 0;
        if (code) return code;
    }
    return 0;
}

static const cli_flag *cli_find(const char *arg, size_t n) { /* "-m" or "--model", n bytes of it */
    for (int i = 0; i < COUNT(cli_flags); i++) {
        const cli_flag *f = &cli_flags[i];
        if (!f->name) continue;
        if (n == 2 && f->brief[0] && arg[1] == f->brief[0]) return f;
        if (n > 2 && arg[1] == '-' && strlen(f->name) == n - 2 && !memcmp(arg + 2, f->name, n - 2)) return f;
    }
    return NULL;
}

/* A flag on the command line goes before what the environment says, also where one excludes the other. */
static void cli_override(cli *c, const cli *env, const cli_flag *f) {
    if (f->field == AT(prompt) && c->file == env->file) c->file = NULL;
    if (f->field == AT(file) && c->prompt == env->prompt) c->prompt = NULL;
    cli_list *list = f->type == CLI_LIST ? (cli_list *)(void *)((char *)c + f->field) : NULL;
    const cli_list *before = f->type == CLI_LIST ? (const cli_list *)(const void *)((const char *)env + f->field) : NULL;
    if (list && list->n && list->at[0] == before->at[0]) list->n = 0;
}

static int cli_parse(cli *c, unsigned command, int argc, char **argv, toka_err *e) {
    toka_err env_error = {0};
    cli_environment(c, command, &env_error);
    const cli env = *c;
    int code = 0;
    for (int i = 0; i < argc && !code; i++) {
        const char *arg = argv[i], *eq = arg[0] == '-' && arg[1] == '-' ? strchr(arg, '=') : NULL;
        size_t n = eq ? (size_t)(eq - arg) : strlen(arg);
        const cli_flag *f = arg[0] == '-' && n > 1 ? cli_find(arg, n) : NULL;
        if (!f) return fail(e, TOKA_E_USE, "%s: unknown %s; see toka --help", arg, arg[0] == '-' ? "flag" : "argument");
        if (!(f->commands & command)) return fail(e, TOKA_E_USE, "--%s is not for this command; see toka --help", f->name);
        const char *value = eq ? eq + 1 : NULL;
        if (f->type == CLI_BOOL && eq) return fail(e, TOKA_E_USE, "--%s takes no value", f->name);
        if (f->type != CLI_BOOL && !value) {
            if (i + 1 == argc) return fail(e, TOKA_E_USE, "%s needs a value: %s", arg, f->arg);
            value = argv[++i];
        }
        cli_override(c, &env, f);
        code = cli_set(c, f, value, arg, e);
    }
    if (code || !env_error.code || c->help || c->version) return code; /* help comes also where the environment is wrong */
    *e = env_error;
    return e->code;
}

/* ---- toka: complete a prompt ---- */

typedef struct cli_sample { /* one answer as it grows */
    buf text, tokens; /* tokens: the elements of its JSON "tokens" array, one a line */
    toka_finish finish;
    int stop_id;
} cli_sample;

typedef struct cli_run { /* a request under way, the callback's user pointer */
    const cli *c;
    const toka *t;
    cli_sample *samples;
    int n_shown; /* several samples: printed so far, in order */
    toka_err e;  /* of writing; code 0: all was written */
} cli_run;

static const char *cli_finish_name(toka_finish f) {
    static const char *const names[] = {"running", "stop", "length", "cancelled", "error"};
    return names[f];
}

/* The text of one token as it stands inside a text, as a JSON string. */
static void cli_put_token_text(buf *b, const tok *words, int32_t id) {
    tok_stream s;
    buf text = {0};
    tok_stream_init(&s, words, 0);
    tok_stream_follow(&s, -1);
    tok_stream_put(&s, id, &text);
    tok_stream_end(&s, &text);
    tok_stream_free(&s);
    json_put_str(b, buf_view(&text));
    buf_free(&text);
}

/* {"id":..,"token":"..","logprob":..,"sampled_logprob":..,"top":[{"id":..,"token":"..","logprob":..} ..]} */
static void cli_put_token(buf *b, const toka *t, const toka_event *ev) {
    json_put_open(b, '{');
    for (int i = -1; i < ev->n_top; i++) {
        int32_t id = i < 0 ? ev->id : ev->top_ids[i];
        if (i == 0) json_put_key(b, "top"), json_put_open(b, '[');
        if (i >= 0) json_put_open(b, '{');
        json_put_key(b, "id"), json_put_int(b, id);
        if (t->tok) json_put_key(b, "token"), cli_put_token_text(b, t->tok, id);
        json_put_key(b, "logprob"), json_put_num(b, i < 0 ? ev->logprob : ev->top_logprobs[i], true);
        if (i < 0) json_put_key(b, "sampled_logprob"), json_put_num(b, ev->sampled_logprob, true);
        else json_put_close(b, '}');
    }
    if (ev->n_top) json_put_close(b, ']');
    json_put_close(b, '}');
}

/* Several samples: each is printed whole, in order, once those before it have ended. */
static void cli_show_ended(cli_run *r) {
    while (!r->e.code && r->n_shown < r->c->samples && r->samples[r->n_shown].finish != TOKA_RUNNING) {
        buf b = {0};
        buf_printf(&b, "--- sample %d (%s)\n", r->n_shown, cli_finish_name(r->samples[r->n_shown].finish));
        buf_str(&b, buf_view(&r->samples[r->n_shown++].text));
        if (b.p[b.n - 1] != '\n') buf_char(&b, '\n');
        cli_write(buf_view(&b), &r->e);
        buf_free(&b);
    }
}

static int cli_on_event(void *user, const toka_event *ev) {
    cli_run *r = user;
    cli_sample *s = &r->samples[ev->sample];
    bool stream = !r->c->json && r->c->samples == 1;
    buf_put(&s->text, ev->text, ev->text_bytes);
    if (ev->id >= 0 && (r->c->json || r->c->logprobs >= 0)) {
        if (s->tokens.n) buf_c(&s->tokens, ",\n");
        cli_put_token(&s->tokens, r->t, ev);
    }
    s->finish = ev->finish;
    s->stop_id = ev->stop_id;
    if (stream) cli_write((str){ev->text, ev->text_bytes}, &r->e);
    else if (!r->c->json) cli_show_ended(r);
    return cli_interrupted || r->e.code;
}

static int cli_read_prompt(const cli *c, buf *out, toka_err *e) {
    if (c->prompt && c->file) return fail(e, TOKA_E_USE, "--prompt and --file exclude each other");
    if (c->prompt) return buf_c(out, c->prompt), 0;
    bool from_stdin = !c->file || !strcmp(c->file, "-");
    int fd = from_stdin ? 0 : open(c->file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return fail(e, TOKA_E_INPUT, "%s: %s", c->file, strerror(errno));
    int code = os_read_all(fd, from_stdin ? "standard input" : c->file, CLI_MAX_INPUT, out, e);
    if (!from_stdin) close(fd);
    if (!code && cli_interrupted) code = fail(e, TOKA_E_CANCELLED, "interrupted");
    return code;
}

/* Flags over the model's own defaults over what r has. */
static void cli_sampling(const cli *c, const toka *t, toka_request *r) {
    toka_sampling *s = &r->sampling;
    toka_request_model_defaults(t, r);
    if (!isnan(c->temperature)) s->temperature = (float)c->temperature;
    if (!isnan(c->top_p)) s->top_p = (float)c->top_p;
    if (!isnan(c->min_p)) s->min_p = (float)c->min_p;
    if (!isnan(c->repetition_penalty)) s->repetition_penalty = (float)c->repetition_penalty;
    if (!isnan(c->presence_penalty)) s->presence_penalty = (float)c->presence_penalty;
    if (!isnan(c->frequency_penalty)) s->frequency_penalty = (float)c->frequency_penalty;
    if (c->top_k != INT_MIN) s->top_k = c->top_k;
    s->seed = (uint64_t)c->seed;
    s->max_tokens = c->max_tokens;
    s->min_tokens = c->min_tokens;
    s->ignore_eos = c->ignore_eos;
    s->include_stop = c->include_stop;
    s->logprobs = c->logprobs == INT_MIN ? 0 : c->logprobs;
    s->stop = c->stop.at;
    s->n_stop = c->stop.n;
    r->n = c->samples;
}

static void cli_put_message(buf *b, const char *role, str content) {
    json_put_open(b, '{');
    json_put_key(b, "role"), json_put_str(b, str_c(role));
    json_put_key(b, "content"), json_put_str(b, content);
    json_put_close(b, '}');
}

/* messages: the elements of the JSON array so far. Result: the prompt's text through the chat template. */
static int cli_render(const cli *c, const toka *t, const buf *messages, buf *out, toka_err *e) {
    buf b = {0};
    if (pub_need_template(t, e)) return e->code;
    buf_printf(&b, "{\"messages\":[%s],\"add_generation_prompt\":true}", messages->p);
    buf_clear(out);
    int code = pub_render(t, t->chat, t->files, buf_view(&b), c->now, out, e);
    buf_free(&b);
    return code;
}

static void cli_last_line(const cli *c, const toka_usage *u) {
    if (c->quiet) return;
    double rate = u->decode_s > 0 ? (double)MAX(u->output_tokens - 1, 0) / u->decode_s : 0;
    fprintf(stderr, "prompt %lld tokens, generated %lld tokens, %.1f tok/s, first token after %.0f ms\n", (long long)u->prompt_tokens,
            (long long)u->output_tokens, rate, 1e3 * u->prefill_s);
}

static void cli_put_result(buf *b, const cli_run *r, const toka_usage *u) {
    json_put_open(b, '{');
    json_put_key(b, "model"), json_put_str(b, str_c(r->t->files->name));
    json_put_key(b, "samples"), json_put_open(b, '[');
    for (int i = 0; i < r->c->samples; i++) {
        const cli_sample *s = &r->samples[i];
        json_put_open(b, '{');
        json_put_key(b, "index"), json_put_int(b, i);
        json_put_key(b, "text"), json_put_str(b, buf_view(&s->text));
        json_put_key(b, "finish_reason"), json_put_str(b, str_c(cli_finish_name(s->finish)));
        if (s->stop_id >= 0) json_put_key(b, "stop_id"), json_put_int(b, s->stop_id);
        json_put_key(b, "tokens");
        buf_printf(b, "[%s]}", s->tokens.n ? s->tokens.p : "");
    }
    json_put_close(b, ']');
    json_put_key(b, "prompt_tokens"), json_put_int(b, u->prompt_tokens);
    json_put_key(b, "output_tokens"), json_put_int(b, u->output_tokens);
    json_put_key(b, "prefill_s"), json_put_num(b, u->prefill_s, true);
    json_put_key(b, "decode_s"), json_put_num(b, u->decode_s, true);
    json_put_close(b, '}');
    buf_char(b, '\n');
}

/* --logprobs without --json: one line a token on standard error. */
static void cli_show_logprobs(const cli_run *r) {
    if (r->c->json || r->c->logprobs < 0) return;
    for (int i = 0; i < r->c->samples; i++) fprintf(stderr, "%s\n", buf_view(&r->samples[i].tokens).p);
}

/* Runs one prompt. answer: NULL, or gets the first sample's text (for the history of a chat). */
static int cli_complete(const cli *c, toka *t, str prompt, int text_flags, buf *answer, toka_err *e) {
    toka_request r = toka_request_default();
    toka_usage u = {0};
    r.sampling.temperature = t->files->defaults.do_sample ? 1 : 0; /* without a word from anyone, greedy */
    cli_sampling(c, t, &r);
    r.text = prompt.p, r.text_bytes = prompt.n, r.text_flags = text_flags;
    if (c->samples < 1 || c->samples > 1 << 20) return fail(e, TOKA_E_USE, "--samples: %d, expected 1 to 1048576", c->samples);
    cli_run run = {.c = c, .t = t, .samples = mem_zalloc((size_t)c->samples * sizeof(cli_sample))};
    for (int i = 0; i < c->samples; i++) run.samples[i].stop_id = -1;
    int code = toka_generate(t, &r, cli_on_event, &run, &u, e);
    if (run.e.code) *e = run.e, code = e->code;
    bool interrupted = code == TOKA_E_CANCELLED;
    if (interrupted) code = 0;
    for (int i = 0; i < c->samples && interrupted; i++)
        if (run.samples[i].finish == TOKA_RUNNING) run.samples[i].finish = TOKA_CANCELLED;
    if (!code && c->json) {
        buf b = {0};
        cli_put_result(&b, &run, &u);
        code = cli_write(buf_view(&b), e);
        buf_free(&b);
    } else if (!code && c->samples > 1) {
        cli_show_ended(&run);
        if (run.e.code) *e = run.e, code = e->code;
    } else if (!code) {
        code = cli_write(STR("\n"), e);
    }
    if (!code) cli_show_logprobs(&run), cli_last_line(c, &u);
    toka_err unused;
    if (code && !run.e.code && c->samples == 1 && !c->json && run.samples[0].text.n) cli_write(STR("\n"), &unused); /* a line ends */
    if (answer) buf_clear(answer), buf_str(answer, buf_view(&run.samples[0].text));
    for (int i = 0; i < c->samples; i++) buf_free(&run.samples[i].text), buf_free(&run.samples[i].tokens);
    free(run.samples);
    return code;
}

/* One line of standard input without its line end. *more: there was one. */
static int cli_read_line(buf *line, bool *more, toka_err *e) {
    int ch = 0;
    buf_clear(line);
    while (!cli_interrupted && (ch = getchar()) != EOF && ch != '\n') buf_char(line, (char)ch);
    *more = !cli_interrupted && (ch == '\n' || line->n);
    if (ch == EOF && ferror(stdin) && !cli_interrupted) return fail(e, TOKA_E_IO, "standard input: %s", strerror(errno));
    return 0;
}

/* A conversation: every line of input is a user turn; the history goes through the template anew each turn. */
static int cli_chat(const cli *c, toka *t, toka_err *e) {
    buf line = {0}, messages = {0}, prompt = {0}, answer = {0};
    bool terminal = isatty(0), more = true;
    int code = 0;
    if (c->system) cli_put_message(&messages, "system", str_c(c->system));
    if (c->prompt) buf_c(&line, c->prompt);
    while (!cli_interrupted) {
        if (terminal && !line.n) fputs("> ", stderr);
        if (!line.n && (code = cli_read_line(&line, &more, e))) break;
        if (!more) break;
        if (!line.n) continue;
        cli_put_message(&messages, "user", buf_view(&line));
        code = cli_render(c, t, &messages, &prompt, e);
        if (!code) code = cli_complete(c, t, buf_view(&prompt), TOKA_PARSE_SPECIAL, &answer, e);
        if (code) break;
        cli_put_message(&messages, "assistant", buf_view(&answer));
        buf_clear(&line);
    }
    buf_free(&line), buf_free(&messages), buf_free(&prompt), buf_free(&answer);
    return code;
}

static int cli_run_prompt(const cli *c, toka *t, toka_err *e) {
    buf text = {0}, messages = {0}, prompt = {0};
    bool templated = (t->chat || t->chat_error.code) && !c->raw;
    int code = cli_read_prompt(c, &text, e);
    if (!code && c->raw && c->system) code = fail(e, TOKA_E_USE, "--system needs the chat template, --raw leaves it out");
    if (!code && !templated && c->system) code = fail(e, TOKA_E_USE, "--system: %s has no chat template", t->files->name);
    if (!code && templated) {
        if (c->system) cli_put_message(&messages, "system", str_c(c->system));
        cli_put_message(&messages, "user", buf_view(&text));
        code = cli_render(c, t, &messages, &prompt, e);
    }
    if (!code && templated) code = cli_complete(c, t, buf_view(&prompt), TOKA_PARSE_SPECIAL, NULL, e);
    else if (!code) code = cli_complete(c, t, buf_view(&text), TOKA_ADD_SPECIAL | TOKA_PARSE_SPECIAL, NULL, e);
    buf_free(&text), buf_free(&messages), buf_free(&prompt);
    return code;
}

/* A build for GPUs on a machine without says so, once, and goes on. */
static void cli_note_device(const cli *c) {
    char line[200];
    bool any = !c->open.device || !strcmp(c->open.device, "auto");
    if (any && !c->quiet && COUNT(pub_backends) > 1 && !pub_backends[0]->probe(0, line, sizeof line))
        fprintf(stderr, "toka: no GPU (%s); using the CPU\n", line);
}

/* Opens what the flags say, for a command that runs a model. */
static int cli_open(const cli *c, toka **t, toka_err *e) {
    int code = c->dummy_weights ? run_dummy_open(t, &c->open, e) : toka_open(t, &c->open, e);
    if (!code) cli_note_device(c);
    return code;
}

static int cli_run_command(const cli *c, toka_err *e) {
    toka *t;
    if (c->chat && (c->raw || c->file || c->samples != 1))
        return fail(e, TOKA_E_USE, "--chat goes without --raw, --file and --samples");
    if (!c->prompt && !c->file && !c->chat && isatty(0))
        return fail(e, TOKA_E_USE, "no prompt: give -p TEXT, -f FILE, text on standard input, or --chat; see toka --help");
    int code = cli_open(c, &t, e);
    if (code) return code;
    code = c->chat ? cli_chat(c, t, e) : cli_run_prompt(c, t, e);
    toka_close(t);
    return code;
}

/* ---- toka tokenize, template, score, models ---- */

static int cli_parse_ids(str text, ids *out, toka_err *e) {
    const char *p = text.p, *end = text.p + text.n; /* NUL-terminated by os_read_all */
    for (;;) {
        while (p < end && isspace((unsigned char)*p)) p++;
        if (p == end) return 0;
        char *next;
        errno = 0;
        long v = strtol(p, &next, 10);
        if (next == p || errno || v < 0 || v > INT32_MAX || (next < end && !isspace((unsigned char)*next)))
            return fail(e, TOKA_E_INPUT, "standard input: not a token id at byte %td", p - text.p);
        ids_push(out, (int32_t)v);
        p = next;
    }
}

static int cli_tokenize(const cli *c, toka_err *e) {
    buf in = {0}, out = {0};
    ids v = {0};
    toka *t = NULL;
    int code = pub_check_options(&c->open, e);
    if (!code) code = pub_open_text(&t, &c->open, false, e);
    if (!code) code = pub_need_tokenizer(t, e);
    if (!code) code = cli_read_prompt(c, &in, e);
    if (!code && c->decode) {
        code = cli_parse_ids(buf_view(&in), &v, e);
        if (!code) code = tok_decode(t->tok, v.p, v.n, c->no_special ? TOKA_SKIP_SPECIAL : 0, &out, e);
    } else if (!code) {
        code = tok_encode(t->tok, buf_view(&in), TOKA_PARSE_SPECIAL | (c->no_special ? 0 : TOKA_ADD_SPECIAL), &v, e);
        for (size_t i = 0; i < v.n && !code; i++) buf_printf(&out, i ? " %d" : "%d", (int)v.p[i]);
        if (!code) buf_char(&out, '\n');
    }
    if (!code) code = cli_write(buf_view(&out), e);
    buf_free(&in), buf_free(&out), ids_free(&v);
    toka_close(t);
    return code;
}

static int cli_template(const cli *c, toka_err *e) {
    buf in = {0}, out = {0};
    toka *t = NULL;
    tmpl *alone = NULL;
    mf_model names = {0};
    bool needs_model = c->open.model || !c->open.chat_template; /* a template file needs none */
    int code = needs_model ? pub_check_options(&c->open, e) : pub_template_file(c->open.chat_template, &names, &alone, e);
    if (!code && needs_model) code = pub_open_text(&t, &c->open, false, e);
    if (!code && needs_model) code = pub_need_template(t, e);
    if (!code) code = cli_read_prompt(c, &in, e);
    if (!code) code = pub_render(t, t ? t->chat : alone, t ? t->files : &names, buf_view(&in), c->now, &out, e);
    if (!code) code = cli_write(buf_view(&out), e);
    buf_free(&in), buf_free(&out);
    arena_free(&names.a);
    tmpl_del(alone);
    toka_close(t);
    return code;
}

/* Lines "logprob id token", the total on standard error; or one JSON object. */
static int cli_put_scores(const cli *c, const toka *t, const int32_t *v, size_t n, const float *logprobs, toka_err *e) {
    buf out = {0}, quoted = {0};
    double sum = 0;
    if (c->json) json_put_open(&out, '{'), json_put_key(&out, "tokens"), json_put_open(&out, '[');
    for (size_t i = 0; i < n; i++) {
        sum += logprobs[i];
        if (c->json) {
            json_put_open(&out, '{');
            json_put_key(&out, "id"), json_put_int(&out, v[i]);
            json_put_key(&out, "token"), cli_put_token_text(&out, t->tok, v[i]);
            json_put_key(&out, "logprob");
            if (i) json_put_num(&out, logprobs[i], true);
            else json_put_null(&out);
            json_put_close(&out, '}');
        } else {
            buf_printf(&out, "%10.5f %7d ", logprobs[i], (int)v[i]);
            buf_clear(&quoted);
            cli_put_token_text(&quoted, t->tok, v[i]);
            buf_str(&out, buf_view(&quoted));
            buf_char(&out, '\n');
        }
    }
    double perplexity = n > 1 ? exp(-sum / (double)(n - 1)) : 1;
    if (c->json) {
        json_put_close(&out, ']');
        json_put_key(&out, "logprob"), json_put_num(&out, sum, false);
        json_put_key(&out, "perplexity"), json_put_num(&out, perplexity, false);
        buf_c(&out, "}\n");
    }
    int code = cli_write(buf_view(&out), e);
    if (!code && !c->quiet) fprintf(stderr, "%zu tokens, log-probability %.5f, perplexity %.4f\n", n, sum, perplexity);
    buf_free(&out), buf_free(&quoted);
    return code;
}

static int cli_score(const cli *c, toka_err *e) {
    buf in = {0};
    toka *t = NULL;
    int32_t *v = NULL;
    size_t n = 0;
    float *logprobs = NULL;
    int code = cli_open(c, &t, e);
    if (!code) code = cli_read_prompt(c, &in, e);
    if (!code)
        code = toka_encode(t, buf_view(&in).p, in.n, TOKA_PARSE_SPECIAL | (c->no_special ? 0 : TOKA_ADD_SPECIAL), &v, &n, e);
    if (!code) logprobs = mem_zalloc(n * sizeof *logprobs), code = toka_score(t, v, n, logprobs, e);
    if (!code) code = cli_put_scores(c, t, v, n, logprobs, e);
    free(v), free(logprobs), buf_free(&in);
    toka_close(t);
    return code;
}

/* The table of known models, and whether this machine's hub cache has them. */
static int cli_models(const cli *c, toka_err *e) {
    arena a = {0};
    buf out = {0};
    mf_known *known;
    toka_err absent;
    int n;
    int code = mf_models_open(c->open.models_file, &a, &known, &n, e);
    if (!code && !n) code = fail(e, TOKA_E_USE, "no models.txt here or beside the program; give one with --models-file");
    for (int i = 0; i < n && !code; i++) {
        char *folder = NULL;
        const char *here = mf_find_hub(known[i].hub_id, NULL, &folder, &a, &absent) ? "" : "in the hub cache";
        if (!i) buf_printf(&out, "%-28s %-44s %9s  %-8s %s\n", "name", "hub id", "weights", "template", "here");
        buf_printf(&out, "%-28s %-44s %7.2f B  %-8s %s\n", known[i].name, known[i].hub_id, 1e-9 * (double)mf_n_parameters(&known[i].config),
                   known[i].family, here);
    }
    if (!code) code = cli_write(buf_view(&out), e);
    arena_free(&a), buf_free(&out);
    return code;
}

static int cli_batch(const cli *c, toka_err *e) {
    toka *t;
    if (!c->input || !c->output) return fail(e, TOKA_E_USE, "toka batch needs -i IN.jsonl and -o OUT.jsonl");
    if (c->samples < 1 || c->samples > ENG_MAX_N)
        return fail(e, TOKA_E_USE, "--samples: %d, expected 1 to %d", c->samples, ENG_MAX_N);
    int code = cli_open(c, &t, e);
    if (code) return code;
    run_options o = {.in = c->input, .out = c->output, .report = c->report, .now = c->now, .base = toka_request_default(),
                     .quiet = c->quiet, .interrupted = &cli_interrupted};
    cli_sampling(c, t, &o.base);
    o.base.sampling.logprobs = 0;
    code = run_batch(t, &o, e);
    toka_close(t);
    return code;
}

static int cli_bench_throughput(const cli *c, toka_err *e) {
    toka *t;
    if (!c->dataset) return fail(e, TOKA_E_USE, "toka bench throughput needs --dataset FILE");
    if (c->num_prompts < 0) return fail(e, TOKA_E_USE, "--num-prompts: %d, expected 0 or more", c->num_prompts);
    int code = cli_open(c, &t, e);
    if (code) return code;
    run_bench_options o = {.dataset = c->dataset, .num_prompts = c->num_prompts, .base = toka_request_default(), .json = c->json,
                           .quiet = c->quiet, .interrupted = &cli_interrupted};
    cli_sampling(c, t, &o.base);
    o.base.n = 1, o.base.sampling.logprobs = o.base.sampling.min_tokens = o.base.sampling.n_stop = 0;
    code = run_bench_throughput(t, &o, e);
    toka_close(t);
    return code ? code : cli_write(STR(""), e);
}

static int cli_bench_serve(const cli *c, toka_err *e) {
    bs_options o = c->bench;
    char *end = NULL;
    o.request_rate = c->request_rate ? strtod(c->request_rate, &end) : (double)INFINITY; /* strtod reads "inf" too */
    if (end && (end == c->request_rate || *end)) return fail(e, TOKA_E_USE, "--request-rate: '%s' is not a number", c->request_rate);
    o.host = c->host, o.port = c->port, o.model = c->open.model, o.dataset = c->dataset, o.num_prompts = c->num_prompts;
    o.temperature = isnan(c->temperature) ? 0 : c->temperature, o.seed = (uint64_t)c->seed, o.ignore_eos = c->ignore_eos;
    o.json = c->json, o.quiet = c->quiet, o.interrupted = &cli_interrupted;
    int code = bs_bench(&o, e);
    return code ? code : cli_write(STR(""), e);
}

/* ---- toka bench ops ---- */

typedef struct run_ops {
    bool json, first;
    double read; /* bytes per second: the first row */
} run_ops;

/* Prints one row. Share: of the roofline that the measured read bandwidth and RUN_PEAK_TFLOPS make. */
static void run_ops_row(void *user, const toka_bench_row *r) {
    run_ops *o = user;
    double s = r->us * 1e-6;
    if (o->first) o->read = r->bytes / s;
    double floor_s = MAX(r->flop / (RUN_PEAK_TFLOPS * 1e12), r->bytes / o->read);
    const char *bound = r->flop / (RUN_PEAK_TFLOPS * 1e12) > r->bytes / o->read ? "arithmetic" : "memory";
    if (o->json)
        printf("%s\n  {\"op\":\"%s\",\"model\":\"%s\",\"shape\":\"%s\",\"us\":%.3f,\"tflops\":%.2f,\"tbps\":%.4f,\"share\":%.4f,\"bound\":\"%s\"}",
               o->first ? "[" : ",", r->op, r->model, r->shape, r->us, r->flop / s * 1e-12, r->bytes / s * 1e-12, floor_s / s, bound);
    else {
        if (o->first) printf("%-16s %-14s %-28s %10s %9s %7s %7s  %s\n", "op", "model", "shape", "us", "TFLOP/s", "TB/s", "share", "bound by");
        printf("%-16s %-14s %-28s %10.2f %9.1f %7.3f %6.1f%%  %s\n", r->op, r->model, r->shape, r->us, r->flop / s * 1e-12,
               r->bytes / s * 1e-12, 100 * floor_s / s, bound);
    }
    o->first = false;
}

static int run_bench_ops(bool as_json, toka_err *e) {
    char line[200];
    const toka_backend *be = pub_backends[0];
    if (!be->bench) return fail(e, TOKA_E_USE, "toka bench ops needs a build with the GPU half (nvcc, toka_kernels.cu)");
    if (!be->probe(0, line, sizeof line)) return fail(e, TOKA_E_DEVICE, "no GPU: %s", line);
    run_ops o = {.json = as_json, .first = true};
    if (!as_json) printf("%s\n", line);
    int code = be->bench(run_ops_row, &o, e);
    if (as_json && !o.first) puts("\n]");
    return code;
}

static int cli_bench_ops(const cli *c, toka_err *e) {
    int code = run_bench_ops(c->json, e);
    return code ? code : cli_write(STR(""), e);
}

static int cli_bench_plan(const cli *c, toka_err *e) {
    int code = run_bench_plan(c->json, &cli_interrupted, e);
    return code ? code : cli_write(STR(""), e);
}

static int cli_plan(const cli *c, toka_err *e) {
    const toka_options *open = &c->open;
    plan_options o = c->plan;
    buf b = {0};
    o.model = open->model, o.models_file = open->models_file, o.max_len = open->max_model_len, o.max_seqs = open->max_num_seqs;
    o.max_tokens = open->max_num_batched_tokens, o.utilization = open->gpu_memory_utilization, o.samples = c->samples, o.json = c->json;
    int code = plan_make(&o, &b, e);
    if (!code) code = cli_write(buf_view(&b), e);
    buf_free(&b);
    return code;
}

/* One line for each device that this build knows, and for a kind of which there is none the reason. */
static int cli_devices(const cli *c, toka_err *e) {
    buf b = {0};
    char line[200];
    (void)c;
    for (int i = 0; i < COUNT(pub_backends); i++) {
        const toka_backend *be = pub_backends[i];
        int n = 0;
        for (; be->probe(n, line, sizeof line); n++)
            if (n || be->probe(1, (char[200]){0}, 200)) buf_printf(&b, "%s:%d  %s\n", be->name, n, line);
            else buf_printf(&b, "%s  %s\n", be->name, line);
        if (!n) buf_printf(&b, "%s  none: %s\n", be->name, line);
    }
    int code = cli_write(buf_view(&b), e);
    buf_free(&b);
    return code;
}


/* Progress of opening a model, on a terminal only. */
static void cli_progress(void *user, const char *what, double done) {
    (void)user;
    fprintf(stderr, done < 1 ? "\r%s %3.0f %%" : "\r%s %3.0f %%\r\033[K", what, 100 * done);
}

/* ---- toka serve ---- */

enum { CLI_MAX_KEYS = 10000 };

/* Lines of --api-key-file behind the keys that flags gave. keys: [CLI_MAX_KEYS], their bytes in a. */
static int cli_read_keys(const char *path, arena *a, const char **keys, int *n, toka_err *e) {
    str text;
    int code = os_map(path, &text, e), before = *n;
    if (code) return code;
    for (str rest = text; rest.n && !code;) {
        ptrdiff_t feed = str_find(rest, STR("\n"), 0);
        str line = http_trim(str_sub(rest, 0, feed < 0 ? rest.n : (size_t)feed));
        rest = feed < 0 ? STR("") : str_sub(rest, (size_t)feed + 1, rest.n);
        if (str_ends(line, STR("\r"))) line.n--;
        if (!line.n) continue;
        if (*n == CLI_MAX_KEYS) code = fail(e, TOKA_E_INPUT, "--api-key-file %s: more than %d keys", path, CLI_MAX_KEYS);
        else keys[(*n)++] = arena_cstr(a, line);
    }
    os_unmap(text);
    if (!code && *n == before) code = fail(e, TOKA_E_INPUT, "--api-key-file %s: there is no key in it", path);
    return code;
}

static int cli_check_serve(const cli *c, const srv_options *o, toka_err *e) {
    if (c->port < 0 || c->port > 65535) return fail(e, TOKA_E_USE, "--port: %d, expected 0 to 65535", c->port);
    if (strcmp(c->generation_config, "auto") && strcmp(c->generation_config, "vllm"))
        return fail(e, TOKA_E_USE, "--generation-config: '%s', expected auto or vllm", c->generation_config);
    if (o->max_queue < 0) return fail(e, TOKA_E_USE, "--max-queue: %d, expected 0 or more", o->max_queue);
    if (o->max_body_bytes < 1 || o->max_body_bytes > (int64_t)1 << 31)
        return fail(e, TOKA_E_USE, "--max-body-bytes: %lld, expected 1 to 2147483648", (long long)o->max_body_bytes);
    if (o->max_upload_bytes < 1) return fail(e, TOKA_E_USE, "--max-upload-bytes: %lld, expected 1 or more", (long long)o->max_upload_bytes);
    if (o->read_timeout <= 0 || o->write_timeout <= 0 || o->keep_alive <= 0 || o->step_timeout <= 0)
        return fail(e, TOKA_E_USE, "--read-timeout, --write-timeout, --keep-alive, --step-timeout: expected more than 0 seconds");
    if (o->n_workers < 0 || o->n_workers > 64) return fail(e, TOKA_E_USE, "--server-threads: %d, expected 0 to 64", o->n_workers);
    for (int i = 0; i < c->api_keys.n; i++)
        if (!*c->api_keys.at[i]) return fail(e, TOKA_E_USE, "--api-key: it is empty");
    return 0;
}

static int cli_serve(const cli *c, toka_err *e) {
    srv_options o = c->serve;
    arena a = {0};
    int code = cli_check_serve(c, &o, e);
    if (!code) code = pub_check_options(&c->open, e);
    const char **keys = arena_alloc(&a, CLI_MAX_KEYS * sizeof *keys);
    for (int i = 0; i < c->api_keys.n; i++) keys[o.n_keys++] = c->api_keys.at[i];
    if (!code && c->api_key_file) code = cli_read_keys(c->api_key_file, &a, keys, &o.n_keys, e);
    o.open = c->open, o.host = c->host, o.port = c->port, o.keys = keys, o.now = c->now, o.quiet = c->quiet;
    o.names = c->served_names.at, o.n_names = c->served_names.n;
    o.model_defaults = !strcmp(c->generation_config, "auto");
    if (!o.n_workers) o.n_workers = MIN(8, MAX(2, os_n_cores() / 4));
    o.interrupted = &cli_interrupted;
    if (!code) code = srv_run(&o, e);
    if (!code && cli_interrupted == 1) cli_interrupted = 0; /* a server is ended by a signal: that is no failure */
    arena_free(&a);
    return code;
}

static int cli_version(toka_err *e) {
    buf b = {0};
    char line[200];
    buf_printf(&b, "toka %s (device:", TOKA_VERSION);
    for (int i = 0; i < COUNT(pub_backends); i++)
        buf_printf(&b, "%s %s%s", i ? "," : "", pub_backends[i]->name, pub_backends[i]->probe(0, line, sizeof line) ? "" : " (none found)");
    buf_printf(&b, "%s)\n", embedded_model ? "; with the embedded model" : "");
    int code = cli_write(buf_view(&b), e);
    buf_free(&b);
    return code;
}

static int cli_dispatch(int argc, char **argv, toka_err *e) {
    static const struct {
        const char *name, *second; /* "bench", "plan"; NULL: the command is one word */
        unsigned bit;
        int (*main)(const cli *, toka_err *);
    } commands[] = {{"tokenize", NULL, FOR_TOKENIZE, cli_tokenize}, {"template", NULL, FOR_TEMPLATE, cli_template},
                    {"score", NULL, FOR_SCORE, cli_score}, {"models", NULL, FOR_MODELS, cli_models}, {"devices", NULL, FOR_DEVICES, cli_devices},
                    {"batch", NULL, FOR_BATCH, cli_batch}, {"serve", NULL, FOR_SERVE, cli_serve},
                    {"bench", "throughput", FOR_THROUGHPUT, cli_bench_throughput},
                    {"bench", "serve", FOR_BENCH_SERVE, cli_bench_serve}, {"bench", "plan", FOR_BENCH_PLAN, cli_bench_plan},
                    {"bench", "ops", FOR_OPS, cli_bench_ops}, {"plan", NULL, FOR_PLAN, cli_plan}};
    cli c = cli_default();
    int (*command)(const cli *, toka_err *) = cli_run_command;
    unsigned bit = FOR_RUN;
    int skip = argc > 1 && argv[1][0] != '-' ? 2 : 1, code;
    if (skip == 2) {
        const char *second = argc > 2 && argv[2][0] != '-' ? argv[2] : "";
        command = NULL;
        for (int i = 0; i < COUNT(commands); i++)
            if (!strcmp(argv[1], commands[i].name) && (!commands[i].second || !strcmp(second, commands[i].second)))
                command = commands[i].main, bit = commands[i].bit, skip = commands[i].second ? 3 : 2;
        if (!command && !strcmp(argv[1], "bench")) return fail(e, TOKA_E_USE, "toka bench: expected throughput, serve, plan or ops");
        if (!command) return fail(e, TOKA_E_USE, "%s: no such command; see toka --help", argv[1]);
    }
    if ((code = cli_parse(&c, bit, argc - skip, argv + skip, e))) return code;
    if (c.help) return cli_help(e);
    if (c.version) return cli_version(e);
    if (isatty(2) && !c.quiet) c.open.progress = cli_progress;
    return command(&c, e);
}

int toka_main(int argc, char **argv) {
    toka_err e = {0};
    cli_catch_signals();
    int code = cli_dispatch(argc, argv, &e);
    if (code && !(cli_interrupted && code == TOKA_E_CANCELLED)) fprintf(stderr, "toka: %s\n", e.msg);
    if (cli_interrupted) return 130;
    return !code ? 0 : code == TOKA_E_USE || code == TOKA_E_INPUT ? 1 : 2;
}

#ifdef TOKA_MAIN
int main(int argc, char **argv) { return toka_main(argc, argv); }
#endif
