/* example.c - toka as a library: includes toka.h, is linked with toka.o, prints a completion.
 *   cc -c toka.c && cc test/example.c toka.o -I. -lm -lpthread -o example
 *   ./example MODEL "prompt" */
#include "toka.h"
#include <stdio.h>
#include <string.h>

/* a value other than 0 would end the request */
static int print_piece(void *user, const toka_event *ev) {
    return fwrite(ev->text, 1, ev->text_bytes, user) != ev->text_bytes;
}

int main(int argc, char **argv) {
    toka *t;
    toka_err e;
    toka_options o = toka_options_default();
    toka_request r = toka_request_default();
    o.model = argc > 1 ? argv[1] : "test/model";
    r.text = argc > 2 ? argv[2] : "Tom has 12 apples.", r.text_bytes = strlen(r.text);
    r.sampling.temperature = 0, r.sampling.max_tokens = 40;
    int code = toka_open(&t, &o, &e);
    if (!code) code = toka_generate(t, &r, print_piece, stdout, NULL, &e);
    if (code) fprintf(stderr, "%s\n", e.msg);
    toka_close(t);
    return code != 0;
}
