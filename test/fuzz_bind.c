/* fuzz_bind.c - libFuzzer entry: makes a table of tensors for a tiny model, and binds it. The first
 * byte chooses the model; the others change names, types, shapes and numbers of the table. Each
 * tensor is an allocation of its own, so AddressSanitizer sees a read outside. A table without a
 * change must bind. After a binding every row of every weight is read. */

static const char *const fuzz_bind_models[] = {
    "{\"model_type\":\"llama\"," "\"hidden_size\":16,\"num_attention_heads\":2,\"intermediate_size\":24,\"vocab_size\":8,\"attention_bias\":true,"
    "\"mlp_bias\":true,\"num_hidden_layers\":2}",
    "{\"model_type\":\"phi3\",\"hidden_size\":16,\"num_attention_heads\":2,\"num_key_value_heads\":1,\"intermediate_size\":24,\"vocab_size\":8,"
    "\"num_hidden_layers\":1,\"eos_token_id\":0,\"quantization_config\":{\"quant_method\":\"awq\",\"bits\":4,\"group_size\":8}}",
    "{\"model_type\":\"gemma3_text\",\"hidden_size\":16,\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":8,\"intermediate_size\":24,"
    "\"vocab_size\":8,\"num_hidden_layers\":1,\"quantization_config\":{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":8,\"desc_act\":true}}",
    "{\"model_type\":\"olmo2\",\"hidden_size\":16,\"num_attention_heads\":2,\"intermediate_size\":24,\"vocab_size\":8,\"num_hidden_layers\":1,"
    "\"quantization_config\":{\"config_groups\":{\"a\":{\"targets\":[\"re:.*(q|k|v|o)_proj\"],\"format\":\"pack-quantized\",\"weights\":"
    "{\"num_bits\":4,\"type\":\"int\",\"group_size\":8,\"symmetric\":false,\"actorder\":\"group\"}},\"b\":{\"targets\":[\"Linear\"],\"format\":"
    "\"float-quantized\",\"weights\":{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"channel\"},\"input_activations\":{\"dynamic\":false}}}}}",
    "{\"model_type\":\"qwen2_moe\",\"hidden_size\":16,\"num_attention_heads\":2,\"num_key_value_heads\":1,\"intermediate_size\":24,\"vocab_size\":8,"
    "\"num_hidden_layers\":2,\"num_experts\":3,\"num_experts_per_tok\":2,\"moe_intermediate_size\":8,\"shared_expert_intermediate_size\":8,"
    "\"mlp_only_layers\":[1],\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[7,5],"
    "\"modules_to_not_convert\":[\"lm_head\"]}}",
    "{\"model_type\":\"gpt_oss\",\"hidden_size\":32,\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":8,\"intermediate_size\":32,"
    "\"vocab_size\":8,\"num_hidden_layers\":1,\"num_local_experts\":3,\"num_experts_per_tok\":2,\"quantization_config\":{\"quant_method\":\"mxfp4\","
    "\"modules_to_not_convert\":[\"model.layers.*.self_attn\",\"lm_head\",\"model.embed_tokens\",\"model.layers.*.mlp.router\"]}}",
    "{\"model_type\":\"gpt_oss\",\"hidden_size\":12,\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":8,\"intermediate_size\":10,"
    "\"vocab_size\":8,\"num_hidden_layers\":1,\"num_local_experts\":3,\"num_experts_per_tok\":2}",
    "{\"model_type\":\"deepseek_v3\",\"hidden_size\":16,\"num_attention_heads\":2,\"intermediate_size\":24,\"vocab_size\":8,\"num_hidden_layers\":2,"
    "\"q_lora_rank\":6,\"kv_lora_rank\":8,\"qk_nope_head_dim\":4,\"qk_rope_head_dim\":4,\"v_head_dim\":6,\"n_routed_experts\":4,\"n_group\":2,"
    "\"topk_group\":1,\"num_experts_per_tok\":2,\"moe_intermediate_size\":8,\"first_k_dense_replace\":1,\"quantization_config\":"
    "{\"quant_method\":\"fp8\",\"activation_scheme\":\"static\"}}",
};

typedef struct fuzz_table {
    const uint8_t *p, *end; /* the input's bytes that are left */
    arena memory;
    st_set set;
    bool changed;           /* the table is not what the model needs */
    void *data[400];        /* [n_data] malloc'ed */
    int n_data;
} fuzz_table;

static int fuzz_table_byte(fuzz_table *table) { return table->p < table->end ? *table->p++ : 0; }

/* Adds a tensor, changed as the next bytes say. dims: [n_dims], n_dims at most 4. */
static void fuzz_table_add(fuzz_table *table, const char *module, const char *suffix, const char *dtype, const int64_t *dims, int n_dims) {
    const int change = fuzz_table_byte(table), which = change ? fuzz_table_byte(table) : 0;
    const uint8_t fill = (uint8_t)fuzz_table_byte(table);
    char name[200];
    toka_err e;
    st_tensor *t = arena_zalloc(&table->memory, sizeof *t);
    snprintf(name, sizeof name, "%s%s%s", module, suffix, change == 7 ? "x" : "");
    *t = (st_tensor){.name = arena_str(&table->memory, str_c(name)), .file = "f", .n_dims = n_dims};
    memcpy(t->dims, dims, (size_t)n_dims * sizeof *dims);
    for (int i = 0; i < COUNT(st_dtypes); i++)
        if (!strcmp(st_dtypes[i].name, dtype)) t->dtype = &st_dtypes[change == 6 ? which % COUNT(st_dtypes) : i];
    table->changed |= change >= 1 && change <= 7;
    table->changed |= fill; /* a scale may be infinite, a group out of range */
    if (change == 1 || t->dtype->bits < 8) return;
    if (change == 2) t->dims[which % 4]++;
    if (change == 3 && t->dims[which % 4] > 0) t->dims[which % 4]--;
    if (change == 4) t->n_dims = MAX(n_dims - 1, 0);
    if (change == 5) t->dims[MIN(n_dims, 3)] = which % 3, t->n_dims = n_dims + 1;
    t->end = (uint64_t)t->dtype->bits / 8;
    for (int i = 0; i < MIN(t->n_dims, 4); i++) t->end *= (uint64_t)t->dims[i];
    t->data = table->data[table->n_data++] = mem_alloc((size_t)t->end);
    memset(table->data[table->n_data - 1], fill, (size_t)t->end);
    st_set_add(&table->set, t, &e);
}

/* Adds the tensors of a quantized matrix [rows][cols], X of them if stacked is not 0. */
static void fuzz_table_quantized(fuzz_table *table, const mf_format *format, const char *module, int rows, int cols, int stacked) {
    const mf_method *m = format->method;
    const int nr = format->block_rows ? (rows - 1) / format->block_rows + 1 : 1, ng = format->block_cols ? (cols - 1) / format->block_cols + 1 : 1;
    const bool mx = m->dtype == TOKA_MXFP4, fp8 = m->dtype == TOKA_FP8, by_columns = m->packing != TOKA_PACK_ROWS;
    int64_t data[4] = {rows, cols}, scale[] = {by_columns ? ng : nr, by_columns ? nr : ng}, mx_scale[] = {stacked, rows, cols / 32};
    int64_t zero[] = {by_columns ? ng : rows / 8, by_columns ? rows / 8 : ng}, order[] = {cols}, one[] = {1};
    if (mx) data[0] = stacked, data[1] = rows, data[2] = cols / 32, data[3] = 16;
    else if (m->packing == TOKA_PACK_GPTQ) data[0] = cols / 8, data[1] = rows;
    else if (m->packing == TOKA_PACK_AWQ) data[0] = cols, data[1] = rows / 8;
    else if (!fp8) data[1] = cols / 8;
    fuzz_table_add(table, module, m->data, fp8 ? "F8_E4M3" : mx ? "U8" : "I32", data, mx ? 4 : 2);
    fuzz_table_add(table, module, m->scale, mx ? "U8" : "F32", mx ? mx_scale : scale, mx ? 3 : 2);
    if (format->has_zero) fuzz_table_add(table, module, m->zero, "I32", zero, 2);
    if (format->has_order) fuzz_table_add(table, module, m->order, "I32", order, 1);
    if (format->has_input_scale) {
        fuzz_table_add(table, module, m->input_scale, "F32", one, 1);
        table->changed = true; /* zero bytes are no scale */
    }
}

static void fuzz_table_binding(fuzz_table *table, const mf_config *c, const mf_binding *b, const char *name) {
    const mf_slot *slot = &mf_slots[b->slot];
    const int n_parts = mf_count_parts(b), stacked = slot->owner == MF_OF_EXPERT && !strchr(b->suffix, '#') ? c->moe.n_experts : 0;
    int rows = 0, cols = mf_dim_product(c, slot->cols);
    for (int i = 0; i < n_parts; i++) rows += mf_dim_product(c, mf_slots[b[i].slot].rows);
    str module = str_c(name);
    if (str_ends(module, STR(".weight"))) module.n -= 7;
    const mf_format *format = *slot->rows ? mf_find_format(c, module) : NULL;
    char text[160];
    snprintf(text, sizeof text, "%.*s", (int)module.n, module.p);
    const bool plain = fuzz_table_byte(table) == 255; /* a plain tensor is always right */
    int64_t matrix[] = {rows, cols}, vector[] = {(int64_t)cols * n_parts}, stack[] = {stacked, cols, rows}, vectors[] = {stacked, (int64_t)cols * n_parts};
    if (format && !plain) fuzz_table_quantized(table, format, text, rows, cols, stacked);
    else if (!*slot->rows) fuzz_table_add(table, name, "", "BF16", stacked ? vectors : vector, stacked ? 2 : 1);
    else fuzz_table_add(table, name, "", "BF16", stacked ? stack : matrix, stacked ? 3 : 2);
}

static void fuzz_table_fill(fuzz_table *table, const mf_config *c) {
    char name[128];
    for (const mf_binding *it = mf_model_names; it->suffix; it++) {
        snprintf(name, sizeof name, "model.%s", it->suffix);
        fuzz_table_binding(table, c, it, name);
    }
    if (c->features & MF_LM_HEAD) fuzz_table_binding(table, c, &mf_lm_head_name, mf_lm_head_name.suffix);
    for (int layer = 0; layer < c->shape.L; layer++)
        for (mf_cursor at = {c, layer, 0, NULL}; mf_next(&at);) {
            const int n = strchr(at.binding->suffix, '#') ? mf_count_copies(c, at.binding) : 1;
            for (int i = 0; i < n; i++) {
                mf_put_name(name, "model.", layer, at.binding->suffix, i);
                fuzz_table_binding(table, c, at.binding, name);
            }
            at.binding += mf_count_parts(at.binding) - 1;
        }
}

static void fuzz_table_read(const toka_tensor *t) {
    float row[256];
    if (!t->rows) return;
    if (t->cols > COUNT(row)) abort();
    for (int i = 0; i < t->rows; i++) toka_weight_row(t, i, row);
}

static int fuzz_bind(const uint8_t *data, size_t size) {
    fuzz_table *table = mem_zalloc(sizeof *table);
    const char *text = fuzz_bind_models[(size ? data[0] : 0) % COUNT(fuzz_bind_models)];
    mf_config c;
    toka_err e;
    toka_weights w;
    mf_rank rank = {.tp_rank = 1, .tp_size = 2, .pp_size = 1};
    toka_shape shape;
    toka_weights slice;
    table->p = data + (size > 0), table->end = data + size;
    if (mf_config_parse(str_c(text), "c", &table->memory, &c, &e)) printf("%s\n", e.msg), fflush(stdout), abort();
    fuzz_table_fill(table, &c);
    mf_binder b = {.config = &c, .set = &table->set, .where = "f", .weights = &w};
    const int code = mf_bind(&b, &table->memory, &e);
    if (code && !table->changed) printf("%s\n", e.msg), fflush(stdout), abort();
    for (int layer = 0; layer < c.shape.L && !code; layer++) {
        mf_owners owners = mf_owners_of(&w.layers[layer]);
        owners.of[MF_OF_MODEL] = &w;
        for (int i = 0; i < MF_N_SLOTS; i++)
            for (int x = 0; x < (mf_slots[i].owner == MF_OF_EXPERT ? c.moe.n_experts : 1); x++)
                if (owners.of[mf_slots[i].owner]) fuzz_table_read(mf_tensor(&owners, i, x));
    }
    if (!code && !mf_shard(&c.shape, &w, &rank, &table->memory, &shape, &slice, &e)) fuzz_table_read(&slice.layers[0].o), fuzz_table_read(&slice.layers[0].mlp.down);
    st_set_free(&table->set);
    arena_free(&table->memory);
    for (int i = 0; i < table->n_data; i++) free(table->data[i]);
    free(table);
    return 0;
}
