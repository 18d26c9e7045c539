/* test_base.c - messages cannot control a terminal; the OS shell: why a thread could not be
 * started, and waits that a change of the wall clock does not affect. */

static void base_test_message(void) {
    toka_err e;
    /* U+009B is CSI, the same as ESC [ */
    fail(&e, TOKA_E_USE, "%s", "a\x1B[2J\x7F\n\xC2\x9B" "2J\xC2\x80|\xC3\x9B\xC2\xA0\xE2\x82\xAC\xC2");
    CHECK_MSG(!strcmp(e.msg, "a?[2J????2J??|\xC3\x9B\xC2\xA0\xE2\x82\xAC\xC2"), "%s", e.msg);
}

static void *base_thread(void *arg) { return arg; }

static void base_test_thread(void) {
    pthread_attr_t usual, huge;
    pthread_t thread;
    toka_err e;
    void *got = NULL;
    int there;
    CHECK(!os_thread_start(&thread, base_thread, &there, &e) && !pthread_join(thread, &got) && got == &there);
    CHECK(!pthread_getattr_default_np(&usual) && !pthread_attr_init(&huge));
    CHECK(!pthread_attr_setstacksize(&huge, (size_t)1 << 56) && !pthread_setattr_default_np(&huge));
    errno = 0; /* pthread_create does not set it */
    CHECK(os_thread_start(&thread, base_thread, NULL, &e) == TOKA_E_IO);
    CHECK_MSG(!strcmp(e.msg, "cannot start a thread: Resource temporarily unavailable"), "%s", e.msg);
    CHECK(!pthread_setattr_default_np(&usual));
    pthread_attr_destroy(&usual), pthread_attr_destroy(&huge);
}

static void base_test_wait(void) {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t cond;
    os_cond_init(&cond);
    pthread_mutex_lock(&lock);
    double t0 = os_now();
    CHECK(!os_cond_wait(&cond, &lock, 0.05));
    double waited = os_now() - t0;
    /* with another clock it would end at once, or never */
    CHECK_MSG(waited >= 0.05 && waited < 5, "%g s", waited);
    pthread_mutex_unlock(&lock);
    pthread_cond_destroy(&cond);
}

static const struct test base_tests[] = {
    {"base: a message's control characters", base_test_message}, {"os: a thread that cannot start", base_test_thread},
    {"os: a wait with an end", base_test_wait}, {NULL, NULL}};
