/* fuzz_adapter.c - libFuzzer entry: the two files of an adapter (LoRA) for a tiny model. The first byte chooses the model of
 * fuzz_bind.c, the second says how the rest is read: as the two files, parted by a zero byte, or as changes of an adapter as PEFT
 * writes it, which must be read if nothing is changed. What was read has the shapes of the model's matrices, and is all there. */

typedef struct fuzz_lora {
    fuzz_table in; /* the input's bytes that are left, and whether something was changed */
    int rank;
    buf settings, header, data;
} fuzz_lora;

/* Adds lora_A or lora_B of a module, changed as the next bytes say. */
static void fuzz_lora_add(fuzz_lora *lora, const char *module, const char *part, int rows, int cols) {
    static const char *const types[] = {"F32", "BF16", "F16", "F64", "I8"};
    static const int bytes[] = {4, 2, 2, 8, 1};
    const int change = fuzz_table_byte(&lora->in), type = change == 1 ? fuzz_table_byte(&lora->in) % COUNT(types) : 0;
    const int fill = change == 2 ? fuzz_table_byte(&lora->in) : 0, before = (int)lora->data.n;
    if (change == 3) return (void)(lora->in.changed = true);
    rows += change == 4, cols -= change == 5 && cols > 1;
    for (int i = 0; i < rows * cols * bytes[type]; i++) buf_char(&lora->data, (char)fill);
    buf_printf(&lora->header, "%s\"%smodel.%s%s.lora_%s.weight\":{\"dtype\":\"%s\",\"shape\":[%d,%d],\"data_offsets\":[%d,%zu]}",
               lora->header.n > 1 ? "," : "", change == 6 ? "" : "base_model.model.", module, change == 7 ? "x" : "", part, types[type], rows, cols,
               before, lora->data.n);
    lora->in.changed |= change >= 1 && change != 6 && change <= 7;
}

/* Makes an adapter of all matrices that may have one. */
static void fuzz_lora_make(fuzz_lora *lora, const mf_config *c) {
    static const char *const more[] = {"", ",\"use_rslora\":true", ",\"use_dora\":true", ",\"bias\":\"all\"", ",\"modules_to_save\":[\"lm_head\"]",
                                       ",\"rank_pattern\":{\"q_proj\":0}", ",\"rank_pattern\":{\"q.*\":3}", ",\"alpha_pattern\":{\"q_proj\":1e999}"};
    const int which = fuzz_table_byte(&lora->in) % COUNT(more);
    lora->rank = 1 + fuzz_table_byte(&lora->in) % 4;
    lora->in.changed = which > 1;
    buf_printf(&lora->settings, "{\"peft_type\":\"LORA\",\"r\":%d,\"lora_alpha\":8,\"target_modules\":\"all-linear\"%s}", lora->rank, more[which]);
    buf_char(&lora->header, '{');
    for (int layer = 0; layer < c->shape.L; layer++)
        for (mf_matrices it = mf_begin_matrices(c, layer); mf_next_matrix(&it);) {
            const mf_binding *binding = it.at.binding;
            const int cols = mf_dim_product(c, mf_slots[binding->slot].cols);
            int rows = 0;
            char name[128];
            for (int i = 0; i < mf_count_parts(binding); i++) rows += mf_dim_product(c, mf_slots[binding[i].slot].rows);
            mf_put_name(name, "", layer, binding->suffix, 0);
            name[strlen(name) - strlen(".weight")] = 0;
            fuzz_lora_add(lora, name, "A", lora->rank, cols);
            fuzz_lora_add(lora, name, "B", rows, lora->rank);
        }
    buf_char(&lora->header, '}');
}

/* Reads all numbers of a part; aborts if its shapes are not those of the matrix. */
static void fuzz_lora_check(const toka_low_rank *part, int rows, int cols) {
    float row[256];
    if (part->a.cols != cols || part->b.rows != rows || part->a.rows != part->b.cols || part->a.rows < 1 || !isfinite(part->scale)) abort();
    if (cols > COUNT(row) || part->b.cols > COUNT(row)) abort();
    for (int i = 0; i < part->a.rows; i++) toka_weight_row(&part->a, i, row);
    for (int i = 0; i < part->b.rows; i++) toka_weight_row(&part->b, i, row);
}

static int fuzz_adapter(const uint8_t *data, size_t size) {
    fuzz_lora lora = {0};
    mf_adapter adapter;
    mf_config c;
    toka_err e;
    buf file = {0};
    const char *text = fuzz_bind_models[(size ? data[0] : 0) % COUNT(fuzz_bind_models)];
    lora.in.p = data + (size > 0), lora.in.end = data + size;
    if (mf_config_parse(str_c(text), "c", &lora.in.memory, &c, &e)) abort();
    const bool makes = fuzz_table_byte(&lora.in) % 2 == 0;
    if (makes) {
        fuzz_lora_make(&lora, &c);
        for (int i = 0; i < 8; i++) buf_char(&file, (char)((uint64_t)lora.header.n >> 8 * i));
        buf_str(&file, buf_view(&lora.header)), buf_str(&file, buf_view(&lora.data));
    } else {
        const size_t n = (size_t)(lora.in.end - lora.in.p);
        const uint8_t *zero = n ? memchr(lora.in.p, 0, n) : NULL;
        const size_t n_settings = zero ? (size_t)(zero - lora.in.p) : n;
        buf_put(&lora.settings, (const char *)lora.in.p, n_settings);
        if (zero) buf_put(&file, (const char *)zero + 1, n - n_settings - 1);
        lora.in.changed = true;
    }
    adapter = (mf_adapter){0};
    const int code = mf_read_adapter(&c, "f", buf_view(&lora.settings), buf_view(&file), 16, &adapter, &e);
    if (code && (!lora.in.changed || !e.msg[0])) printf("%s\n", e.msg), fflush(stdout), abort();
    for (int layer = 0; layer < c.shape.L && !code; layer++)
        for (mf_matrices it = mf_begin_matrices(&c, layer); mf_next_matrix(&it);) {
            int rows = 0;
            for (int i = 0; i < mf_count_parts(it.at.binding); i++) rows += mf_dim_product(&c, mf_slots[it.at.binding[i].slot].rows);
            if (adapter.parts[it.number].a.rows)
                fuzz_lora_check(&adapter.parts[it.number], rows, mf_dim_product(&c, mf_slots[it.at.binding->slot].cols));
        }
    arena_free(&adapter.memory);
    arena_free(&lora.in.memory);
    buf_free(&lora.settings), buf_free(&lora.header), buf_free(&lora.data), buf_free(&file);
    return 0;
}
