/* late.h - an asynchronous backend, as a GPU is one: an op only queues its work. A thread of the
 * device runs it later with the CPU's ops. Samples are there once the step is finished. It detects
 * a violation of the rules of begin, end and finish: a step that is finished in the wrong order,
 * changed or read too early (until then the samples are poisoned, and TSan sees every access), or
 * more steps in flight than n_ahead. */

enum { LATE_DEVICES = 64, LATE_OPS = 4096, LATE_STEPS = 8, LATE_CAPTURED = 3 };

typedef enum late_kind { LATE_ALL_REDUCE, LATE_SEND, LATE_RECEIVE, LATE_COPY, LATE_EMBED, LATE_KEEP_IDS, LATE_KEEP_AUX, LATE_QKV,
    LATE_ATTENTION, LATE_OUT, LATE_MLP, LATE_SAMPLE, LATE_END } late_kind;

typedef struct late_op {
    late_kind kind;
    const toka_step *s;
    int layer, rows;
    toka_dev_ptr a, b; /* a: o of LATE_OUT, q of LATE_ATTENTION, else x */
} late_op;

typedef struct late_device {
    toka_device *d;
    pthread_t thread;
    toka_hidden x;        /* of the thread: the step that it runs */
    pthread_mutex_t lock; /* guards all fields below */
    pthread_cond_t changed;
    late_op ops[LATE_OPS];
    int64_t n_queued, n_done;
    const toka_step *steps[LATE_STEPS]; /* a ring of the steps that are begun and not finished */
    toka_sample_result *to[LATE_STEPS], *results[LATE_STEPS];
    int64_t n_begun, n_ended, n_ran, n_finished;
    int max_in_flight; /* the largest number of steps in flight */
    /* captured steps; ops in the capture that is open, -1: none is open */
    int n_captured, captured_ops;
    bool closing;
    uint64_t rng;
    toka_err error;
} late_device;

static late_device *late_devices[LATE_DEVICES];
static pthread_mutex_t late_lock = PTHREAD_MUTEX_INITIALIZER;
/* The largest number of steps in flight on any device; a test resets it. */
static int late_max_in_flight;
static atomic_int late_violations; /* how often the rules of begin, end and finish were broken */

static late_device *late_find(const toka_device *d) {
    late_device *found = NULL;
    pthread_mutex_lock(&late_lock);
    for (int i = 0; i < LATE_DEVICES && !found; i++)
        if (late_devices[i] && late_devices[i]->d == d) found = late_devices[i];
    pthread_mutex_unlock(&late_lock);
    return found;
}

static void late_run_op(late_device *l, const late_op *op) {
    toka_device *d = l->d;
    l->x.data = op->kind == LATE_OUT ? op->b : op->a; /* its state is what the CPU's ops have left */
    switch (op->kind) {
    case LATE_ALL_REDUCE: toka_cpu.all_reduce(d, &l->x, op->rows); break;
    case LATE_SEND: toka_cpu.send(d, &l->x, op->rows); break;
    case LATE_RECEIVE: toka_cpu.receive(d, &l->x, op->rows); break;
    case LATE_COPY: toka_cpu.copy_pages(d, op->s); break;
    case LATE_EMBED: toka_cpu.embed(d, op->s, &l->x); break;
    case LATE_KEEP_IDS: toka_cpu.keep_ids(d, op->s); break;
    case LATE_KEEP_AUX: toka_cpu.keep_aux(d, op->s, op->layer, &l->x); break;
    case LATE_QKV: toka_cpu.norm_qkv_rope_kv(d, op->s, op->layer, &l->x, op->b); break;
    case LATE_ATTENTION: toka_cpu.attention(d, op->s, op->layer, op->a, op->b); break;
    case LATE_OUT: toka_cpu.out_residual(d, op->s, op->layer, op->a, &l->x); break;
    case LATE_MLP: toka_cpu.norm_mlp_residual(d, op->s, op->layer, &l->x); break;
    case LATE_SAMPLE: toka_cpu.norm_logits_sample(d, op->s, &l->x, l->results[l->n_ran % LATE_STEPS]); break;
    case LATE_END: break;
    }
}

static void *late_thread(void *arg) {
    late_device *l = arg;
    pthread_mutex_lock(&l->lock);
    for (;;) {
        while (l->n_done == l->n_queued && !l->closing) pthread_cond_wait(&l->changed, &l->lock);
        if (l->n_done == l->n_queued) break;
        const late_op op = l->ops[l->n_done % LATE_OPS];
        const useconds_t delay_us = op.kind == LATE_END ? (useconds_t)(rnd(&l->rng) % 400) : 0;
        pthread_mutex_unlock(&l->lock);
        if (delay_us) usleep(delay_us);
        late_run_op(l, &op);
        pthread_mutex_lock(&l->lock);
        if (!l->error.code) toka_cpu.status(l->d, &l->error);
        l->n_done++, l->n_ran += op.kind == LATE_END;
        pthread_cond_broadcast(&l->changed);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

static void late_queue_op(toka_device *d, late_op op) {
    late_device *l = late_find(d);
    pthread_mutex_lock(&l->lock);
    if (l->captured_ops >= 0) { /* capturing: runs nothing */
        l->captured_ops++;
        pthread_mutex_unlock(&l->lock);
        return;
    }
    assert(l->n_queued - l->n_done < LATE_OPS);
    late_violations += l->n_begun != l->n_ended + 1 || (op.s && op.s != l->steps[l->n_ended % LATE_STEPS]);
    l->ops[l->n_queued++ % LATE_OPS] = op;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
}

/* Gives the engine the steps to capture, before the first real one. */
static const toka_step *late_capture(toka_device *d) {
    static const toka_step step = {.T = 1, .n_samples = 1};
    late_device *l = late_find(d);
    late_violations += l->n_begun != 0 || l->captured_ops >= 0;
    if (l->n_captured++ == LATE_CAPTURED) return NULL;
    l->captured_ops = 0;
    return &step;
}

static void late_begin(toka_device *d, const toka_step *s) {
    late_device *l = late_find(d);
    if (l->captured_ops >= 0) return;
    late_violations += l->n_captured != LATE_CAPTURED + 1;
    pthread_mutex_lock(&l->lock);
    late_violations += l->n_begun != l->n_ended || l->n_begun - l->n_finished >= LATE_STEPS;
    l->steps[l->n_begun % LATE_STEPS] = s, l->to[l->n_begun % LATE_STEPS] = NULL;
    l->n_begun++;
    l->max_in_flight = MAX(l->max_in_flight, (int)(l->n_begun - l->n_finished));
    pthread_mutex_unlock(&l->lock);
}

static void late_end(toka_device *d, const toka_step *s, toka_hidden *x) {
    (void)x;
    late_device *l = late_find(d);
    /* embed or receive, the head or send, four ops a layer, and all-reduces if there are any */
    if (l->captured_ops >= 0) {
        late_violations += l->captured_ops < 2 + 4 * d->shape->L;
        l->captured_ops = -1;
        return;
    }
    late_queue_op(d, (late_op){.kind = LATE_END, .s = s});
    pthread_mutex_lock(&l->lock);
    l->n_ended++;
    pthread_mutex_unlock(&l->lock);
}

static void late_finish(toka_device *d, const toka_step *s) {
    late_device *l = late_find(d);
    pthread_mutex_lock(&l->lock);
    const int i = (int)(l->n_finished % LATE_STEPS);
    late_violations += l->n_finished >= l->n_ended || l->steps[i] != s;
    while (l->n_ran <= l->n_finished) pthread_cond_wait(&l->changed, &l->lock);
    if (l->to[i] && !l->error.code) memcpy(l->to[i], l->results[i], (size_t)s->n_samples * sizeof *l->to[i]);
    l->n_finished++;
    pthread_mutex_unlock(&l->lock);
}

static int late_status(toka_device *d, toka_err *e) {
    late_device *l = late_find(d);
    pthread_mutex_lock(&l->lock);
    const int code = l->error.code;
    if (code) *e = l->error;
    pthread_mutex_unlock(&l->lock);
    return code;
}

static void late_all_reduce(toka_device *d, toka_hidden *x, int rows) { late_queue_op(d,
    (late_op){.kind = LATE_ALL_REDUCE, .rows = rows, .a = x->data}); }
static void late_send(toka_device *d, toka_hidden *x, int rows) { late_queue_op(d,
    (late_op){.kind = LATE_SEND, .rows = rows, .a = x->data}); }
static void late_receive(toka_device *d, toka_hidden *x, int rows) { late_queue_op(d,
    (late_op){.kind = LATE_RECEIVE, .rows = rows, .a = x->data}); }
static void late_copy(toka_device *d, const toka_step *s) { late_queue_op(d, (late_op){.kind = LATE_COPY, .s = s}); }
static void late_embed(toka_device *d, const toka_step *s, toka_hidden *x) { late_queue_op(d,
    (late_op){.kind = LATE_EMBED, .s = s, .a = x->data}); }
static void late_keep_ids(toka_device *d, const toka_step *s) { late_queue_op(d, (late_op){.kind = LATE_KEEP_IDS, .s = s}); }
static void late_keep_aux(toka_device *d, const toka_step *s, int i, const toka_hidden *x) {
    late_queue_op(d, (late_op){.kind = LATE_KEEP_AUX, .s = s, .layer = i, .a = x->data});
}
static void late_qkv(toka_device *d, const toka_step *s, int layer, toka_hidden *x, toka_dev_ptr q) {
    late_queue_op(d, (late_op){LATE_QKV, s, layer, 0, x->data, q});
}
static void late_attention(toka_device *d, const toka_step *s, int layer, toka_dev_ptr q, toka_dev_ptr o) {
    late_queue_op(d, (late_op){LATE_ATTENTION, s, layer, 0, q, o});
}
static void late_out(toka_device *d, const toka_step *s, int layer, toka_dev_ptr o, toka_hidden *x) {
    late_queue_op(d, (late_op){LATE_OUT, s, layer, 0, o, x->data});
}
static void late_mlp(toka_device *d, const toka_step *s, int layer, toka_hidden *x) {
    late_queue_op(d, (late_op){.kind = LATE_MLP, .s = s, .layer = layer, .a = x->data});
}
static void late_sample(toka_device *d, const toka_step *s, toka_hidden *x, toka_sample_result *samples) {
    late_device *l = late_find(d);
    pthread_mutex_lock(&l->lock);
    if (l->captured_ops < 0) l->to[(l->n_begun - 1) % LATE_STEPS] = samples, memset(samples, 0x7E, (size_t)s->n_samples * sizeof *samples);
    pthread_mutex_unlock(&l->lock);
    late_queue_op(d, (late_op){.kind = LATE_SAMPLE, .s = s, .a = x->data});
}

static int late_open(toka_device **out, const toka_device_options *o, const toka_shape *shape, const toka_weights *weights, toka_err *e) {
    int code = toka_cpu.open(out, o, shape, weights, e), at = 0;
    if (code) return code;
    late_device *l = mem_zalloc(sizeof *l);
    l->d = *out, l->captured_ops = -1, l->rng = 88172645463325252u + (uint64_t)o->pp_rank;
    pthread_mutex_init(&l->lock, NULL), pthread_cond_init(&l->changed, NULL);
    for (int i = 0; i < LATE_STEPS; i++) l->results[i] = mem_alloc((size_t)o->max_samples * sizeof *l->results[i]);
    pthread_mutex_lock(&late_lock);
    while (late_devices[at]) at++;
    assert(at < LATE_DEVICES);
    late_devices[at] = l;
    pthread_mutex_unlock(&late_lock);
    if (pthread_create(&l->thread, NULL, late_thread, l)) abort();
    return 0;
}

static void late_close(toka_device *d) {
    late_device *l = late_find(d);
    pthread_mutex_lock(&l->lock);
    l->closing = true;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    pthread_join(l->thread, NULL);
    /* close comes after the last step has finished */
    late_violations += l->n_begun != l->n_ended || l->n_ended != l->n_finished;
    pthread_mutex_lock(&late_lock);
    late_max_in_flight = MAX(late_max_in_flight, l->max_in_flight);
    for (int i = 0; i < LATE_DEVICES; i++)
        if (late_devices[i] == l) late_devices[i] = NULL;
    pthread_mutex_unlock(&late_lock);
    for (int i = 0; i < LATE_STEPS; i++) free(l->results[i]);
    toka_cpu.close(d);
    free(l);
}

static toka_backend late_backend(int n_ahead) {
    toka_backend be = toka_cpu;
    be.open = late_open, be.close = late_close, be.status = late_status;
    be.capture = late_capture, be.begin = late_begin, be.end = late_end, be.finish = late_finish;
    be.all_reduce = late_all_reduce, be.send = late_send, be.receive = late_receive;
    be.copy_pages = late_copy;
    be.embed = late_embed, be.keep_ids = late_keep_ids, be.keep_aux = late_keep_aux;
    be.norm_qkv_rope_kv = late_qkv, be.attention = late_attention;
    be.out_residual = late_out, be.norm_mlp_residual = late_mlp, be.norm_logits_sample = late_sample;
    be.max_in_flight = n_ahead;
    return be;
}
