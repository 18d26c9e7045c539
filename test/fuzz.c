/* fuzz.c - all fuzzers as one libFuzzer program, so that toka.c is compiled once for them.
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -o fuzz test/fuzz.c -lm -lpthread
 *   TOKA_FUZZ=json ./fuzz -max_total_time=60 corpus_folder test/corpus/json
 *
 * Each fuzz_NAME.c is a function that takes one input; it aborts if something that must hold does
 * not. Functions named cpu_* are not instrumented (fuzz.ignore). */
#define TOKA_SERVER
#include "../toka.c"

#include "fuzz_api.c"
#include "fuzz_batch.c"
#include "fuzz_bind.c"
#include "fuzz_adapter.c" /* has the models of fuzz_bind.c */
#include "fuzz_config.c"
#include "fuzz_constraint.c"
#include "fuzz_form.c"
#include "fuzz_http.c"
#include "fuzz_hub.c"
#include "fuzz_json.c"
#include "fuzz_parse.c"
#include "fuzz_safetensors.c"
#include "fuzz_template.c"
#include "fuzz_tokenizer.c"

static const struct {
    const char *name;
    int (*run)(const uint8_t *data, size_t size);
} fuzzers[] = {{"adapter", fuzz_adapter}, {"api", fuzz_api}, {"batch", fuzz_batch}, {"bind", fuzz_bind},
               {"config", fuzz_config}, {"constraint", fuzz_constraint}, {"form", fuzz_form}, {"http", fuzz_http}, {"hub", fuzz_hub}, {"json", fuzz_json}, {"parse", fuzz_parse},
               {"safetensors", fuzz_safetensors}, {"template", fuzz_template}, {"tokenizer", fuzz_tokenizer}};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int chosen = -1;
    const char *name = getenv("TOKA_FUZZ");
    for (int i = 0; chosen < 0 && name && i < COUNT(fuzzers); i++)
        if (!strcmp(fuzzers[i].name, name)) chosen = i;
    if (chosen < 0) fprintf(stderr, "TOKA_FUZZ: the name of a fuzzer, as test/fuzz_NAME.c\n"), exit(1);
    return fuzzers[chosen].run(data, size);
}
