/* test_mf.c - chapters 11 to 16: RoPE tables, config.json, safetensors, the index, the hub cache,
 * models.txt. Files that must be refused are made here: a tiny Llama in a temporary folder with one
 * thing wrong. The tests check the error's message. */

/* ---- RoPE tables ---- Float64 values of the published formulas, computed independently with numpy
 * at D = 16:
 *   default  theta^(-2i/D)        linear  that / factor
 *   llama3   turns = original * w / 2 pi, keep = clip((turns - low) / (high - low), 0, 1):
 *            w * (keep + (1 - keep) / factor)
 *   yarn     pair(r) = D/2 * ln(original / 2 pi r) / ln theta;
 *            slow = clip((i - pair(beta_fast)) / (pair(beta_slow) - pair(beta_fast)), 0, 1), its
 *            ends rounded outwards unless truncate is false: w * (1 - slow + slow / factor) */

static const struct mft_rope_case {
    mf_rope rope;
    double scale, freq[8];
} mft_rope_cases[] = {
    {{.kind = MF_ROPE_DEFAULT, .theta = 1e4}, 1,
     {1, 0.316227766, 0.1, 0.0316227766, 0.01, 0.00316227766, 0.001, 0.000316227766}},
    {{.kind = MF_ROPE_LINEAR, .theta = 900, .factor = 6.5}, 1,
     {0.153846154, 0.0657364625, 0.0280883363, 0.0120017811, 0.00512820513, 0.00219121542, 0.000936277876, 0.000400059371}},
    {{.kind = MF_ROPE_LLAMA3, .theta = 5e5, .factor = 32, .low_freq_factor = 1, .high_freq_factor = 4,
     .original_len = 8192}, 1,
     {1, 0.193922745, 0.0376060309, 0.00729266474, 0.000429556797, 8.57025549e-06, 1.66196747e-06, 3.22293293e-07}},
    {{.kind = MF_ROPE_LLAMA3, .theta = 5e4, .factor = 8, .low_freq_factor = 1.5, .high_freq_factor = 6,
     .original_len = 48}, 1,
     {1, 0.0562377475, 0.00835925381, 0.00216170418, 0.000559016994, 0.000144561871, 3.73837195e-05, 9.66743497e-06}},
    {{.kind = MF_ROPE_YARN, .theta = 1e3, .factor = 8, .original_len = 64, .beta_fast = 32, .beta_slow = 1},
     1.2079441541679836,
     {1, 0.29870169, 0.0740949754, 0.00937367762, 0.00395284708, 0.00166690179, 0.000702926656, 0.000296421713}},
    {{.kind = MF_ROPE_YARN, .theta = 1e6, .factor = 4, .original_len = 32768, .beta_fast = 32, .beta_slow = 1},
     1.138629436111989,
     {1, 0.177827941, 0.0316227766, 0.00421755994, 0.0005, 4.44569853e-05, 7.90569415e-06, 1.40585331e-06}},
    {{.kind = MF_ROPE_YARN, .theta = 2e3, .factor = 8, .original_len = 64, .beta_fast = 4, .beta_slow = .5,
      .attention_factor = .83}, .83,
     {1, 0.302107343, 0.0841133689, 0.0198772573, 0.00279508497, 0.00108085209, 0.000417962691, 0.000161625085}},
    {{.kind = MF_ROPE_YARN, .theta = 3e3, .factor = 8, .original_len = 64, .beta_fast = 32, .beta_slow = 1, .mscale = 2,
      .mscale_all_dim = .7}, 1.2359781994567032,
     {1, 0.260373945, 0.0563000065, 0.00620854084, 0.00228217732, 0.000838898135, 0.000308367835, 0.000113351929}},
    {{.kind = MF_ROPE_YARN, .theta = 4e3, .factor = 4, .original_len = 280, .beta_fast = 32, .beta_slow = 1, .mscale = 1.5,
      .fractional = true}, 1.138629436111989,
     {1, 0.300458584, 0.0783319566, 0.0177728391, 0.00395284708, 0.00140169174, 0.000497044205, 0.000176253405}},
};

static void test_mf_rope(void) {
    for (int i = 0; i < COUNT(mft_rope_cases); i++) {
        float freq[8], scale;
        mf_rope_table(&mft_rope_cases[i].rope, 16, freq, &scale);
        CHECK_MSG(fabs(scale - mft_rope_cases[i].scale) < 1e-6, "case %d: scale %.9g", i, scale);
        for (int j = 0; j < 8; j++)
            CHECK_MSG(fabs(freq[j] / mft_rope_cases[i].freq[j] - 1) < 2e-6, "case %d: freq[%d] %.9g", i, j, freq[j]);
    }
}

/* ---- config.json ---- */

/* Parses `text`. If `want` is NULL it must pass, otherwise the error's message must contain
 * `want`. */
static bool mft_config(const char *text, const char *want, arena *a, mf_config *c) {
    toka_err e;
    int code = mf_config_parse(str_c(text), "config.json", a, c, &e);
    bool ok = want ? code == TOKA_E_INPUT && strstr(e.msg, want) : code == 0;
    CHECK_MSG(ok, "%s\n  gave: %s\n  want: %s", text, code ? e.msg : "no error", want ? want : "no error");
    return ok && !want;
}

#define M_LLAMA "{\"architectures\":[\"LlamaForCausalLM\"]"
#define M_QUANT M_LLAMA ",\"quantization_config\":{\"quant_method\":"
#define M_QWEN2 "{\"architectures\":[\"Qwen2ForCausalLM\"],\"num_hidden_layers\":4"

static const char *const mft_bad_configs[][2] = {
    {"", "text ends too early at byte 0"},
    {"[]", "not a JSON object"},
    {"{", "JSON"},
    {"{}", "model_type is missing, expected LlamaForCausalLM"},
    {"{\"architectures\":[]}", "architectures is an array"},
    {"{\"architectures\":[\"OtherForCausalLM\"]}", "architectures[0] is \"OtherForCausalLM\", expected LlamaForCausalLM"},
    {"{\"model_type\":\"mixtral\",\"num_local_experts\":4097}", "num_local_experts is 4097, expected 1 to 4096"},
    {"{\"model_type\":\"mixtral\",\"num_experts_per_tok\":9}", "num_experts_per_tok is 9, expected 1 to 8"},
    {"{\"model_type\":\"glm4_moe\",\"head_dim\":128,\"n_group\":8,\"topk_group\":1,\"num_experts_per_tok\":17}", "topk_group is 1, expected so many groups"},
    {"{\"model_type\":\"glm4_moe\",\"head_dim\":128,\"n_group\":128,\"topk_group\":8}", "n_group is 128, expected a number of equal groups"},
    {"{\"model_type\":\"glm4_moe\",\"head_dim\":128,\"scoring_func\":\"softmax\"}", "scoring_func is \"softmax\", expected \"sigmoid\""},
    {"{\"model_type\":\"gpt_oss\",\"swiglu_alpha\":1}", "swiglu_alpha is 1, expected 1.702"},
    {"{\"model_type\":\"deepseek_v2\",\"num_experts_per_tok\":6,\"norm_topk_prob\":true}", "norm_topk_prob is true, expected false"},
    {"{\"model_type\":\"deepseek_v2\"}", "num_experts_per_tok is missing, expected 1 to 64"},
    {"{\"model_type\":\"deepseek_v2\",\"num_experts_per_tok\":6,\"topk_method\":\"noaux_tc\"}", "topk_method is \"noaux_tc\", expected \"greedy\""},
    {"{\"model_type\":\"deepseek_v3\",\"attention_bias\":true}", "attention_bias is true, expected false: MLA"},
    {"{\"model_type\":\"deepseek_v3\",\"kv_lora_rank\":0}", "kv_lora_rank is 0, expected 1 to"},
    {"{\"model_type\":\"deepseek_v3\",\"moe_layer_freq\":2}", "moe_layer_freq is 2, expected 1"},
    {"{\"model_type\":\"qwen3_moe\",\"clip_qkv\":8.0}", "clip_qkv is 8, expected none"},
    {"{\"model_type\":\"olmoe\",\"clip_qkv\":-8.0}", "clip_qkv is -8, expected a number from"},
    {"{\"model_type\":\"qwen3_moe\",\"mlp_only_layers\":3}", "mlp_only_layers is 3, expected a list of layers"},
    {"{\"architectures\":[7]}", "architectures[0] is 7"},
    {"{\"model_type\":\"gemma\"}", "model_type is \"gemma\""},
    {M_LLAMA ",\"model_type\":\"mistral\"}", "model_type is \"mistral\", expected \"llama\", that of LlamaForCausalLM"},
    {"{\"architectures\":[\"MistralForCausalLM\"],\"model_type\":\"ministral\"}", "model_type is \"ministral\", expected \"mistral\""},
    {"{\"model_type\":\"ministral3\"}", "model_type is \"ministral3\", expected LlamaForCausalLM"},
    {M_LLAMA ",\"is_causal\":false}", "is_causal is false, expected true"},
    {M_LLAMA ",\"num_hidden_layers\":0}", "num_hidden_layers (L) is 0, expected 1 to 4096"},
    {M_LLAMA ",\"num_hidden_layers\":-3}", "num_hidden_layers (L) is -3"},
    {M_LLAMA ",\"num_hidden_layers\":4097}", "num_hidden_layers (L) is 4097"},
    {M_LLAMA ",\"num_hidden_layers\":2.5}", "num_hidden_layers is 2.5, expected a whole number"},
    {M_LLAMA ",\"num_hidden_layers\":99999999999999999999}", "num_hidden_layers is 1e+20, expected a whole number"},
    {M_LLAMA ",\"hidden_size\":\"big\"}", "hidden_size is \"big\", expected a whole number"},
    {M_LLAMA ",\"hidden_size\":[4096]}", "hidden_size is an array"},
    {M_LLAMA ",\"hidden_size\":100}", "hidden_size is 100, expected a multiple of num_attention_heads, 32, or a head_dim"},
    {M_LLAMA ",\"num_attention_heads\":0}", "num_attention_heads (H) is 0"},
    {M_LLAMA ",\"num_key_value_heads\":5}",
     "num_attention_heads (H) is 32, expected a multiple of num_key_value_heads (K), 5"},
    {M_LLAMA ",\"head_dim\":7}", "head_dim (D) is 7, expected an even number"},
    {M_LLAMA ",\"head_dim\":-1}", "head_dim (D) is -1"},
    {M_LLAMA ",\"vocab_size\":67108865}", "vocab_size (V) is 67108865"},
    {M_LLAMA ",\"max_position_embeddings\":0}", "max_position_embeddings (max_len) is 0"},
    {M_LLAMA ",\"rms_norm_eps\":-1}", "rms_norm_eps is -1, expected a number from 0 to 1"},
    {M_LLAMA ",\"rms_norm_eps\":true}", "rms_norm_eps is true"},
    {M_LLAMA ",\"hidden_act\":\"gelu\"}", "hidden_act is \"gelu\", expected \"silu\""},
    {"{\"model_type\":\"mistral\",\"mlp_bias\":true}", "mlp_bias is true, expected false"},
    {"{\"model_type\":\"olmo3\",\"rope_parameters\":{\"rope_type\":\"default\"}}", "rope_parameters is an object, expected an object with the objects"},
    {"{\"model_type\":\"olmo3\",\"rope_parameters\":{\"full_attention\":7}}", "expected an object with the objects full_attention"},
    {"{\"model_type\":\"phi3\",\"rope_scaling\":{\"type\":\"su\",\"short_factor\":[1],\"long_factor\":[1]}}",
     "rope_scaling.short_factor is an array, expected a list of 48 numbers"},
    {"{\"model_type\":\"phi3\",\"partial_rotary_factor\":0.01}", "partial_rotary_factor is 0.01, expected a part of the head with an even"},
    {"{\"model_type\":\"smollm3\",\"use_sliding_window\":true}", "use_sliding_window is true, expected false"},
    {"{\"model_type\":\"smollm3\",\"no_rope_layers\":7}", "no_rope_layers is 7, expected a list"},
    {"{\"model_type\":\"granite\",\"logits_scaling\":0}", "logits_scaling is 0, expected a number"},
    {"{\"model_type\":\"gemma2\",\"hidden_activation\":\"gelu\"}", "hidden_activation is \"gelu\", expected \"silu\" or \"gelu_pytorch_tanh\""},
    {"{\"architectures\":[\"XForCausalLM\"],\"auto_map\":{}}", "architectures[0] is \"XForCausalLM\", expected an architecture of toka: the folder's own code"},
    {"{\"model_type\":\"llava\",\"text_config\":{\"model_type\":\"llama\",\"hidden_size\":7}}",
     "hidden_size is 7, expected a multiple of num_attention_heads"},
    {M_LLAMA ",\"attention_bias\":1}", "attention_bias is 1, expected true or false"},
    {M_LLAMA ",\"quantization_config\":{\"quant_method\":\"gptq\"}}", "quantization_config.group_size is missing, expected 1 or more"},
    {M_LLAMA ",\"quantization_config\":[]}", "quantization_config is an array, expected an object"},
    {M_LLAMA ",\"compression_config\":{}}", "quantization_config.quant_method is missing, expected fp8, compressed-tensors"},
    {M_QUANT "\"pack-quantized\"}}", "quant_method is \"pack-quantized\", expected fp8"},
    {M_QUANT "\"gptq\",\"group_size\":64,\"dynamic\":{\"+:x\":{\"bits\":4}}}}", "dynamic is \"+:x\", expected only"},
    {M_QUANT "\"gptq\",\"group_size\":64,\"checkpoint_format\":\"marlin\"}}", "is \"marlin\", expected \"gptq\" or \"gptq_v2\""},
    {M_QUANT "\"fp8\",\"fmt\":\"e5m2\"}}", "quantization_config.fmt is \"e5m2\", expected \"e4m3\""},
    {M_QUANT "\"fp8\",\"modules_to_not_convert\":[\"re:a(?=b)\"]}}", "modules_to_not_convert is \"re:a(?=b)\", expected a name"},
    {M_QUANT "\"fp8\",\"ignored_layers\":[7]}}", "ignored_layers is 7"},
    {M_QUANT "\"compressed-tensors\",\"format\":\"pack-quantized\"}}", "config_groups is missing"},
    {M_QUANT "\"compressed-tensors\",\"sparsity_config\":{\"format\":\"sparse-24-bitmask\"}}}", "sparsity_config.format is \"sparse-24"},
    {M_QUANT "\"compressed-tensors\",\"format\":\"float-quantized\",\"config_groups\":{\"g\":{\"weights\":{\"num_bits\":8,"
     "\"type\":\"int\"}}}}}", "quantization_config.config_groups.g.weights.type is \"int\", expected \"float\""},
    {M_QUANT "\"compressed-tensors\",\"format\":\"float-quantized\",\"config_groups\":{\"g\":{\"weights\":{\"strategy\":\"group\"}}}}}",
     "weights.strategy is \"group\", expected \"tensor\", \"channel\" or \"block\""},
    {M_QUANT "\"compressed-tensors\",\"format\":\"float-quantized\",\"config_groups\":{\"g\":{\"weights\":{\"strategy\":\"block\"}}}}}",
     "weights.block_structure is missing, expected [rows, columns]"},
    {M_LLAMA ",\"final_logit_softcapping\":30.0}", "final_logit_softcapping is 30, expected none"},
    {M_LLAMA ",\"num_local_experts\":8}", "num_local_experts is 8, expected none"},
    {M_LLAMA ",\"partial_rotary_factor\":0.5}", "partial_rotary_factor is 0.5, expected 1"},
    {M_LLAMA ",\"rope_theta\":0}", "rope_theta is 0"},
    {M_LLAMA ",\"rope_scaling\":7}", "rope_scaling is 7, expected an object"},
    {M_LLAMA ",\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}}",
     "rope_scaling.type is \"dynamic\", expected default, linear, llama3, yarn or longrope"},
    {M_LLAMA ",\"rope_parameters\":{\"rope_type\":\"longrope\"}}", "rope_parameters.short_factor is missing"},
    {M_LLAMA ",\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"default\"}}}", "one RoPE for all layers"},
    {M_LLAMA ",\"rope_scaling\":{\"type\":\"linear\"}}", "rope_scaling.factor is missing"},
    {M_LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":0}}", "rope_scaling.factor is 0"},
    {M_LLAMA ",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8,\"high_freq_factor\":4}}",
     "rope_scaling.low_freq_factor is missing"},
    {M_LLAMA ",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_factor\":4}}",
     "rope_scaling.high_freq_factor is 4, expected more than low_freq_factor"},
    {M_LLAMA ",\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":8,\"partial_rotary_factor\":0.25}}",
     "rope_parameters.partial_rotary_factor is 0.25"},
    {M_LLAMA ",\"eos_token_id\":[2,\"x\"]}", "eos_token_id is \"x\", expected a token id or a list"},
    {"{\"architectures\":[\"MistralForCausalLM\"],\"sliding_window\":0}", "sliding_window is 0, expected 1 or more"},
    {M_QWEN2 ",\"use_sliding_window\":true,\"layer_types\":[\"full_attention\"]}",
     "layer_types is an array, expected a list with one"},
    {M_QWEN2 ",\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\",\"linear_attention\"]}",
     "layer_types is \"linear_attention\""},
    {M_QWEN2 ",\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\",\"sliding_attention\"]}",
     "as there is no window"},
};

static void test_mf_config_refused(void) {
    arena a = {0};
    mf_config c;
    for (int i = 0; i < COUNT(mft_bad_configs); i++) mft_config(mft_bad_configs[i][0], mft_bad_configs[i][1], &a, &c);
    arena_free(&a);
}

static bool mft_shape_is(const mf_config *c, int L, int E, int H, int K, int D, int F, int V, int max_len) {
    const toka_shape *s = &c->shape;
    return s->L == L && s->E == E && s->H == H && s->K == K && s->D == D && s->F == F && s->V == V && s->max_len == max_len;
}

static void test_mf_config_defaults(void) {
    arena a = {0};
    mf_config c;
    if (mft_config(M_LLAMA "}", NULL, &a, &c)) {
        CHECK(mft_shape_is(&c, 32, 4096, 32, 32, 128, 11008, 32000, 2048));
        CHECK(c.shape.eps == 1e-6f && c.rope.theta == 10000 && c.rope.kind == MF_ROPE_DEFAULT && c.features == MF_LM_HEAD);
        CHECK(c.bos_id == 1 && c.n_eos_ids == 1 && c.eos_ids[0] == 2 && c.rope_table.scale == 1 && c.window[31] == 0);
    }
    if (mft_config("{\"architectures\":null,\"model_type\":\"mistral\"}", NULL, &a, &c)) {
        CHECK(mft_shape_is(&c, 32, 4096, 32, 8, 128, 14336, 32000, 131072));
        CHECK(c.window[0] == 4096 && c.window[31] == 4096 && c.features == MF_LM_HEAD);
    }
    if (mft_config("{\"model_type\":\"ministral\"}", NULL, &a, &c)) {
        CHECK(mft_shape_is(&c, 32, 4096, 32, 8, 128, 14336, 32000, 131072) && c.bos_id == 1 && c.eos_ids[0] == 2);
        CHECK(c.window[0] == 4096 && c.window[31] == 4096 && c.features == MF_LM_HEAD);
    }
    if (mft_config("{\"architectures\":[\"Qwen2ForCausalLM\"],\"attention_bias\":false}", NULL, &a, &c)) {
        CHECK(mft_shape_is(&c, 32, 4096, 32, 32, 128, 22016, 151936, 32768));
        CHECK(c.features == (MF_QKV_BIAS | MF_LM_HEAD) && c.window[31] == 0 && c.bos_id == -1 && c.n_eos_ids == 0);
    }
    if (mft_config("{\"architectures\":[\"Qwen3ForCausalLM\"],\"hidden_size\":1000}", NULL, &a, &c))
        CHECK(mft_shape_is(&c, 32, 1000, 32, 32, 128, 22016, 151936, 32768) && c.features == (MF_QK_NORM | MF_LM_HEAD));
    arena_free(&a);
}

static void test_mf_config_fields(void) {
    arena a = {0};
    mf_config c;
    if (mft_config(M_LLAMA ",\"num_key_value_heads\":null,\"head_dim\":null,\"rope_scaling\":null,"
                   "\"num_attention_heads\":16,\"attention_bias\":true,\"tie_word_embeddings\":true,"
                   "\"eos_token_id\":[5,99999,7,-1],\"bos_token_id\":null,"
                   "\"rope_theta\":777,\"hidden_act\":\"swish\",\"num_experts\":0,\"quantization_config\":null}", NULL,
                   &a, &c)) {
        CHECK(c.shape.K == 16 && c.shape.D == 256 && c.features == (MF_QKV_BIAS | MF_O_BIAS) && c.rope.theta == 777);
        CHECK(c.n_eos_ids == 2 && c.eos_ids[0] == 5 && c.eos_ids[1] == 7 && c.bos_id == -1);
    }
    if (mft_config(M_LLAMA ",\"hidden_size\":64.0,\"num_attention_heads\":4,\"max_position_embeddings\":1.31072e5}", NULL, &a, &c))
        /* as a program writes it that divides: 16.0 */
        CHECK(c.shape.E == 64 && c.shape.D == 16 && c.shape.max_len == 131072);
    if (mft_config("{\"architectures\":[\"MistralForCausalLM\"],\"num_key_value_heads\":null,\"sliding_window\":null,"
                   "\"attention_bias\":true}", NULL, &a, &c))
        CHECK(c.shape.K == 32 && c.window[0] == 0 && c.features == MF_LM_HEAD);
    if (mft_config("{\"architectures\":[\"MistralForCausalLM\"],\"model_type\":\"mistral\",\"is_causal\":true,\"num_hidden_layers\":2,"
                   "\"sliding_window\":8,\"layer_types\":[\"full_attention\",\"sliding_attention\"]}", NULL, &a, &c))
        CHECK(c.window[0] == 0 && c.window[1] == 8);
    if (mft_config("{\"architectures\":[\"MinistralForCausalLM\"],\"model_type\":\"ministral\",\"num_hidden_layers\":3,\"attention_bias\":true,"
                   "\"sliding_window\":8,\"layer_types\":[\"full_attention\",\"sliding_attention\",\"full_attention\"]}", NULL, &a, &c))
        CHECK(c.window[0] == 0 && c.window[1] == 8 && c.window[2] == 0 && c.features == MF_LM_HEAD);
    if (mft_config("{\"architectures\":[\"MinistralForCausalLM\"],\"sliding_window\":null}", NULL, &a, &c)) CHECK(c.window[0] == 0 && c.window[31] == 0);
    if (mft_config(M_QWEN2 ",\"use_sliding_window\":true,\"sliding_window\":64,\"max_window_layers\":3}", NULL, &a, &c))
        CHECK(c.window[2] == 0 && c.window[3] == 64);
    if (mft_config(M_QWEN2 ",\"use_sliding_window\":true,\"sliding_window\":64,\"layer_types\":[\"sliding_attention\","
                   "\"full_attention\",\"sliding_attention\",\"full_attention\"]}", NULL, &a, &c))
        CHECK(c.window[0] == 64 && c.window[1] == 0 && c.window[2] == 64 && c.window[3] == 0);
    if (mft_config(M_QWEN2 ",\"use_sliding_window\":false,\"sliding_window\":64,\"max_window_layers\":0}", NULL, &a, &c))
        CHECK(c.window[0] == 0 && c.window[3] == 0);
    if (mft_config(M_LLAMA ",\"rope_theta\":5,\"rope_parameters\":{\"rope_theta\":600.0,\"rope_type\":\"default\"}}", NULL,
                   &a, &c))
        CHECK(c.rope.theta == 600);
    if (mft_config(M_LLAMA ",\"rope_scaling\":{},\"rope_parameters\":{\"type\":\"linear\",\"factor\":3}}", NULL, &a, &c))
        CHECK(c.rope.kind == MF_ROPE_LINEAR && c.rope.factor == 3);
    if (mft_config(M_LLAMA ",\"max_position_embeddings\":100,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,"
                   "\"beta_fast\":0,\"attention_factor\":null,\"original_max_position_embeddings\":100}}", NULL, &a, &c))
        CHECK(c.rope.kind == MF_ROPE_YARN && c.shape.max_len == 400 && c.rope.beta_fast == 32 &&
              c.rope_table.scale > 1.13f);
    if (mft_config(M_LLAMA ",\"original_max_position_embeddings\":512,\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8,"
                   "\"low_freq_factor\":1,\"high_freq_factor\":4,\"original_max_position_embeddings\":8192}}", NULL,
                   &a, &c))
        CHECK(c.rope.original_len == 512);
    arena_free(&a);
}

/* What each further architecture takes from its row, and from the fields that it reads. */
static void test_mf_config_rows(void) {
    arena a = {0};
    mf_config c;
    const toka_shape *s = &c.shape;
    if (mft_config("{\"model_type\":\"phi3\",\"max_position_embeddings\":131072,\"hidden_size\":64,\"num_attention_heads\":4,"
                   "\"rope_scaling\":{\"type\":\"yarn\",\"short_factor\":[1,1,1,1],\"long_factor\":[1,2,4,8]},"
                   "\"partial_rotary_factor\":0.5}", NULL, &a, &c)) {
        CHECK(c.rope.kind == MF_ROPE_LONGROPE && c.rope_table.dims == 8 && c.rope.original_len == 4096 && c.rope.is_long);
        CHECK(fabs(c.rope_table.scale - sqrt(1 + log(32) / log(4096))) < 1e-6 && fabs(c.rope_table.freq[1] - 0.05f) < 1e-6);
        mf_set_max_len(&c, 4096);
        CHECK(!c.rope.is_long && fabs(c.rope_table.freq[1] - 0.1f) < 1e-6 && c.rope_table.scale > 1.1f);
        mf_set_max_len(&c, 4097);
        CHECK(c.rope.is_long && fabs(c.rope_table.freq[1] - 0.05f) < 1e-6 && c.window[0] == 0 && c.eos_ids[0] == 32000);
    }
    if (mft_config("{\"model_type\":\"gemma2\",\"attn_logit_softcapping\":null}", NULL, &a, &c)) {
        CHECK(s->D == 256 && s->norm_offset == 1 && s->embed_scale == 48 && s->attn_scale == 0.0625f && s->attn_cap == 0 && s->logit_cap == 30);
        CHECK(c.window[0] == 4096 && c.window[1] == 0 && c.activation == TOKA_GELU_TANH && c.features == (MF_NORM_PLUS_1 | MF_EMBED_SQRT) && c.kind[1] == MF_LAYER_ROPE);
    }
    if (mft_config("{\"model_type\":\"gemma3_text\",\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":8}}", NULL, &a, &c)) {
        CHECK(c.window[4] == 4096 && c.window[5] == 0 && c.kind[4] == (MF_LAYER_ROPE | MF_LAYER_LOCAL) && c.kind[5] == MF_LAYER_ROPE);
        CHECK(c.rope.theta == 1e6 && c.rope.factor == 8 && c.local_rope.theta == 1e4 && c.local_rope.kind == MF_ROPE_DEFAULT);
        CHECK(c.rope_table.freq[0] == 0.125f && c.local_table.freq[0] == 1 && c.features == (MF_NORM_PLUS_1 | MF_EMBED_SQRT | MF_QK_NORM));
    }
    if (mft_config("{\"model_type\":\"olmo3\",\"rope_parameters\":{\"sliding_attention\":{\"rope_theta\":300},\"full_attention\":null}}", NULL, &a, &c))
        CHECK(c.rope.theta == 5e5 && c.local_rope.theta == 300 && c.window[3] == 0 && c.features == (MF_QK_NORM_ALL | MF_LM_HEAD));
    if (mft_config("{\"model_type\":\"smollm3\"}", NULL, &a, &c))
        CHECK(c.kind[2] == MF_LAYER_ROPE && c.kind[3] == 0 && c.rope.theta == 2e6 && !(c.features & MF_LM_HEAD));
    if (mft_config("{\"model_type\":\"smollm3\",\"num_hidden_layers\":2,\"no_rope_layers\":[0,1]}", NULL, &a, &c))
        CHECK(c.kind[0] == 0 && c.kind[1] == MF_LAYER_ROPE);
    if (mft_config("{\"model_type\":\"granite\",\"logits_scaling\":8,\"attention_multiplier\":0.5,\"mlp_bias\":true}", NULL, &a, &c))
        CHECK(s->logit_scale == 0.125f && s->attn_scale == 0.5f && s->residual_scale == 1 && c.features == (MF_MLP_BIAS | MF_LM_HEAD));
    if (mft_config("{\"model_type\":\"glm4\"}", NULL, &a, &c))
        CHECK(c.rope_table.dims == 64 && c.rope_table.neighbours && c.features & MF_QKV_BIAS && !(c.features & MF_O_BIAS) && c.n_eos_ids == 3);
    if (mft_config("{\"model_type\":\"qwen2_moe\",\"num_hidden_layers\":4,\"decoder_sparse_step\":2,\"mlp_only_layers\":[3],"
                   "\"use_sliding_window\":true,\"max_window_layers\":2}", NULL, &a, &c)) {
        CHECK(c.kind[0] == MF_LAYER_ROPE && c.kind[1] == (MF_LAYER_ROPE | MF_LAYER_MOE) && c.kind[3] == MF_LAYER_ROPE);
        CHECK(c.moe.n_experts == 60 && c.moe.top_k == 4 && c.moe.kind == TOKA_ROUTER_SOFTMAX && !c.moe.renormalize && c.features & MF_QKV_BIAS);
        CHECK(c.window[0] == 4096 && c.window[1] == 0 && c.window[2] == 0 && s->F == 5632 && mf_dim_product(&c, "M") == 1408);
    }
    if (mft_config("{\"model_type\":\"mixtral\",\"first_k_dense_replace\":1,\"num_experts\":6}", NULL, &a, &c))
        CHECK(c.kind[0] == (MF_LAYER_ROPE | MF_LAYER_MOE) && c.moe.renormalize && c.moe.n_experts == 6 && c.window[0] == 0);
    if (mft_config("{\"model_type\":\"gpt_oss\"}", NULL, &a, &c)) {
        CHECK(c.moe.kind == TOKA_ROUTER_TOPK && c.activation == TOKA_SWIGLU_CLAMPED && s->swiglu_limit == 7 && c.rope.fractional);
        CHECK(c.rope.kind == MF_ROPE_YARN && c.rope.factor == 32 && fabs(c.rope_table.scale - 1.3465736f) < 1e-6 && c.window[0] == 128 && c.window[1] == 0);
    }
    if (mft_config("{\"model_type\":\"glm4_moe\",\"head_dim\":128,\"n_shared_experts\":0,\"use_qk_norm\":true}", NULL, &a, &c)) {
        CHECK(c.kind[0] == MF_LAYER_ROPE && c.kind[1] == (MF_LAYER_ROPE | MF_LAYER_MOE) && c.moe.kind == TOKA_ROUTER_SIGMOID);
        CHECK(!(c.features & MF_SHARED) && c.features & MF_QK_NORM && c.moe.groups_by_top2 && !c.rope_table.neighbours);
    }
    if (mft_config("{\"model_type\":\"deepseek_v2\",\"q_lora_rank\":null,\"num_experts_per_tok\":6,\"n_group\":4,\"rope_scaling\":{"
                   "\"type\":\"yarn\",\"factor\":40,\"mscale\":0.707,\"mscale_all_dim\":0.707,\"original_max_position_embeddings\":4096}}", NULL, &a, &c)) {
        const double m = 0.0707 * log(40) + 1;
        CHECK(s->K == 1 && s->D == 576 && s->Dv == 512 && fabs(s->attn_scale - m * m / sqrt(192)) < 1e-7 && c.rope_table.dims == 64);
        CHECK(c.rope_table.neighbours && c.rope_table.scale == 1 && c.features & MF_Q_FULL && !c.moe.n_groups && !c.moe.renormalize);
        CHECK(mf_dim_product(&c, "Q") == 4096 && mf_dim_product(&c, "HN") == 32 * 192 && mf_dim_product(&c, "HB") == 32 * 256);
        CHECK(mf_dim_product(&c, "HW") == 32 * 128 && mf_dim_product(&c, "S") == 2 * 1407 && s->F == 2814 && c.mla.eps == 1e-6f);
    }
    if (mft_config("{\"model_type\":\"deepseek_v3\",\"rope_interleave\":false}", NULL, &a, &c)) {
        CHECK(!c.rope_table.neighbours && c.moe.n_groups == 8 && c.moe.top_groups == 4 && c.moe.groups_by_top2 && c.moe.scale == 2.5f);
        CHECK(c.features & MF_Q_LORA && c.features & MF_CHOICE_BIAS && c.kind[2] == MF_LAYER_ROPE && s->F == 18432);
        CHECK(llabs(mf_n_parameters(&c) - 671026419200) < 100000000); /* 671 billion, without the layer that predicts one token more */
    }
    if (mft_config("{\"architectures\":[\"LlavaForConditionalGeneration\"],\"model_type\":\"llava\",\"eos_token_id\":9,"
                   "\"text_config\":{\"model_type\":\"llama\",\"hidden_size\":64}}", NULL, &a, &c))
        CHECK(c.has_images && s->E == 64 && c.eos_ids[0] == 9 && !strcmp(c.arch->name, "LlamaForCausalLM"));
    arena_free(&a);
}

/* Regular expressions: those of Python's re.match, as far as they are understood. */
static void test_mf_patterns(void) {
    static const struct {
        const char *pattern, *name;
        int matches; /* -1: not understood */
    } cases[] = {
        {"a", "abc", 1}, {"b", "abc", 0}, {"", "abc", 1}, {"abc", "ab", 0}, {"a.c", "abc", 1}, {"a\\.c", "abc", 0}, {"a\\.c", "a.c", 1},
        {".*c", "abc", 1}, {".*d", "abc", 0}, {"ab*c", "ac", 1}, {"ab*c", "abbbc", 1}, {"ab+c", "ac", 0}, {"ab+c", "abbc", 1},
        {"ab?c", "ac", 1}, {"ab?c", "abc", 1}, {"ab?c", "abbc", 0}, {"a$", "a", 1}, {"a$", "ab", 0}, {"^a", "ab", 1}, {"$", "", 1},
        {".*mlp.gate$", "model.layers.3.mlp.gate", 1}, {".*mlp.gate$", "model.layers.3.mlp.gate_proj", 0},
        {".*(q|k|v)_proj", "x.k_proj", 1}, {".*(q|k|v)_proj", "x.o_proj", 0}, {"(a|bc)*d", "abcabcd", 1}, {"(a|bc)+d", "d", 0},
        {"(?:ab)?c", "abc", 1}, {"model.layers.\\d+.mlp", "model.layers.12.mlp", 1}, {"model.layers.\\d+.mlp", "model.layers.x.mlp", 0},
        {"[a-c1]x", "bx", 1}, {"[a-c1]x", "dx", 0}, {"[^a-c]x", "dx", 1}, {"[^a-c]x", "ax", 0}, {"[]a]x", "]x", 1}, {"[a\\d-]*x", "a-7x", 1},
        {"\\w+\\s\\w", "ab c", 1}, {"a*?b", "aab", 1}, {"()*a", "a", 1}, {"(a*)*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaac", 0}, {"a||b", "b", 1},
        {"a{2}", "aa", -1}, {"(?=a)", "a", -1}, {"(a", "a", -1}, {"a)", "a", -1}, {"[a", "a", -1}, {"*a", "a", -1}, {"\\q", "q", -1}, {"a\\", "a", -1},
    };
    arena a = {0};
    char deep[600];
    for (int i = 0; i < COUNT(cases); i++) {
        const mf_pattern *p = mf_pattern_parse(str_c(cases[i].pattern), &a);
        int got = p ? mf_pattern_match(p, str_c(cases[i].name)) : -1;
        CHECK_MSG(got == cases[i].matches, "%s on %s: %d", cases[i].pattern, cases[i].name, got);
    }
    for (int n = 1; n < 600; n += 23) { /* limits: operations, and the depth of groups */
        memset(deep, n % 2 ? '(' : 'a', (size_t)n);
        CHECK(!mf_pattern_parse((str){deep, (size_t)n}, &a) == (n % 2 || n >= MF_PATTERN_OPS));
    }
    arena_free(&a);
}

/* Which module has which format. */
static void test_mf_formats(void) {
    static const struct {
        const char *config, *module, *method; /* NULL: plain */
        int block_rows, block_cols;
    } cases[] = {
        {M_QUANT "\"fp8\",\"weight_block_size\":[128,64],\"modules_to_not_convert\":[\"lm_head\",\"model.layers.1.mlp\",\"k_proj\"]}}",
         "model.layers.0.mlp.up_proj", "fp8", 128, 64},
        {NULL, "model.layers.1.mlp.up_proj", NULL, 0, 0},
        {NULL, "model.layers.10.mlp.up_proj", "fp8", 128, 64},
        {NULL, "model.layers.0.self_attn.k_proj", NULL, 0, 0},
        {NULL, "lm_head", NULL, 0, 0},
        {M_QUANT "\"mxfp4\",\"modules_to_not_convert\":[\"model.layers.*.self_attn\"]}}", "model.layers.7.self_attn.q_proj", NULL, 0, 0},
        {NULL, "model.layers.7.mlp.experts.down_proj", "mxfp4", 1, 32},
        {M_QUANT "\"gptq\",\"bits\":4,\"group_size\":-1,\"dynamic\":{\"-:.*down\":{}}}}", "a.down_proj", NULL, 0, 0},
        {NULL, "a.up_proj", "gptq", 1, 0},
        {M_QUANT "\"compressed-tensors\",\"ignore\":[\"re:.*gate$\"],\"config_groups\":{"
         "\"a\":{\"targets\":[\"Linear\"],\"format\":\"float-quantized\",\"weights\":{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"channel\"}},"
         "\"b\":{\"targets\":[\"re:.*experts\"],\"format\":\"pack-quantized\",\"weights\":{\"num_bits\":4,\"type\":\"int\",\"group_size\":64}}}}}",
         "model.layers.0.self_attn.q_proj", "float-quantized", 1, 0},
        {NULL, "model.layers.0.mlp.experts.7.up_proj", "pack-quantized", 1, 64},
        {NULL, "model.layers.0.mlp.gate", NULL, 0, 0},
    };
    arena a = {0};
    mf_config c = {0};
    for (int i = 0; i < COUNT(cases); i++) {
        if (cases[i].config && !mft_config(cases[i].config, NULL, &a, &c)) continue;
        const mf_format *f = mf_find_format(&c, str_c(cases[i].module));
        CHECK_MSG(!f == !cases[i].method && (!f || !strcmp(f->method->name, cases[i].method)), "%s: %s", cases[i].module, f ? f->method->name : "plain");
        CHECK(!f || (f->block_rows == cases[i].block_rows && f->block_cols == cases[i].block_cols));
    }
    arena_free(&a);
}

/* The nearest of all e4m3 numbers; of two, the even one. */
static void test_mf_to_fp8(void) {
    for (int i = 0; i < 20000; i++) {
        const float x = i < 512 ? (weight_fp8((unsigned)i / 2) + weight_fp8((unsigned)i / 2 + (i & 1 && i / 2 % 128 < 126))) / 2
                                : ldexpf((float)(hash_mix((uint64_t)i) & 0xFFFFFF) - 0x1p23f, -24 - (int)(hash_mix((uint64_t)i) >> 60)) * 1100;
        unsigned best = 0;
        if (isnan(x)) continue;
        for (unsigned code = 0; code < 256; code++) {
            const float d = fabsf(weight_fp8(code) - x), old = fabsf(weight_fp8(best) - x);
            if (d < old || (d == old && !(code & 1) && best & 1)) best = code;
        }
        CHECK_MSG(weight_fp8(toka_to_fp8(x)) == weight_fp8(best), "%.9g: %g, not %g", x, weight_fp8(toka_to_fp8(x)), weight_fp8(best));
    }
    CHECK(toka_to_fp8(INFINITY) == 0x7E && toka_to_fp8(-1e9f) == 0xFE && toka_to_fp8(NAN) == 0x7F && toka_to_fp8(0) == 0 && toka_to_fp8(-0.0f) == 0x80);
}

/* --quantization fp8: every matrix of a layer is near what it was, and nothing else has changed. */
static void test_mf_quantize(void) {
    mf_model *plain, *m;
    toka_err e;
    float want[4096], got[4096];
    CHECK_MSG(!mf_open(&plain, "test/model", NULL, NULL, &e), "%s", e.msg);
    CHECK_MSG(!mf_open(&m, "test/model", NULL, NULL, &e), "%s", e.msg);
    CHECK_MSG(!mf_quantize(m, NULL, &e), "%s", e.msg);
    CHECK(!m->weights.embed.quant && !m->weights.lm_head.quant && m->weight_bytes < plain->weight_bytes * 2 / 3);
    for (int layer = 0; layer < m->shape.L; layer++)
        for (int slot = 0; slot < MF_N_SLOTS; slot++) {
            if (mf_slots[slot].owner != MF_OF_LAYER) continue;
            const mf_owners a = {{[MF_OF_LAYER] = &plain->weights.layers[layer]}}, b = {{[MF_OF_LAYER] = &m->weights.layers[layer]}};
            const toka_tensor *x = mf_tensor(&a, slot, 0), *y = mf_tensor(&b, slot, 0);
            CHECK(x->rows == y->rows && x->cols == y->cols && x->cols <= COUNT(want));
            CHECK(!y->quant == (!x->rows || !*mf_slots[slot].rows));
            for (int row = 0; row < x->rows && y->quant; row++) {
                float largest = 0;
                toka_weight_row(x, row, want), toka_weight_row(y, row, got);
                for (int i = 0; i < x->cols; i++) largest = MAX(largest, fabsf(want[i]));
                for (int i = 0; i < x->cols; i++)
                    if (!(fabsf(got[i] - want[i]) <= fabsf(want[i]) / 16 + largest * 0x1p-18f)) CHECK_MSG(false, "slot %d row %d: %g, not %g", slot, row, got[i], want[i]);
            }
        }
    mf_close(plain), mf_close(m);
}

/* A quantized matrix of random numbers. It has row_step x as many rows as the tensor, which has every row_step-th, from row0 on. */
static toka_tensor mft_quantized(arena *a, toka_dtype dtype, toka_packing packing, int rows, int cols, int row0, int row_step) {
    static uint32_t seed = 1;
    const int all = rows * row_step, rows8 = (all + 7) / 8 * 8, block = dtype == TOKA_MXFP4 ? 32 : 8;
    toka_quant *q = arena_zalloc(a, sizeof *q);
    unsigned char *data = arena_alloc(a, (size_t)rows8 * cols), *scale = arena_alloc(a, (size_t)rows8 * cols), *zero = arena_alloc(a, (size_t)rows8 * cols);
    for (int i = 0; i < rows8 * cols; i++) {
        seed = seed * 1664525 + 1013904223;
        data[i] = (unsigned char)(seed >> 24), scale[i] = (unsigned char)(120 + (seed >> 16) % 16), zero[i] = (unsigned char)(seed >> 8);
    }
    *q = (toka_quant){.packing = packing, .rows = all, .cols = cols, .block_rows = dtype == TOKA_FP8 ? 3 : 1, .block_cols = block,
                      .scale = scale, .scale_dtype = TOKA_E8M0, .scale_row_step = packing ? 1 : (cols - 1) / block + 1, .scale_col_step = packing ? all : 1,
                      .zero = dtype == TOKA_INT4 ? zero : NULL, .zero_add = 1};
    return (toka_tensor){.data = data, .dtype = dtype, .rows = rows, .cols = cols, .quant = q, .row0 = row0, .row_step = row_step};
}

/* Is `part` the rows from row on, and the columns from col on, of `whole`? */
static void mft_check_slice(const toka_tensor *whole, const toka_tensor *part, int row, int col, int rows, int cols) {
    float want[64], got[64];
    CHECK_MSG(part->rows == rows && part->cols == cols, "[%d,%d], not [%d,%d]", part->rows, part->cols, rows, cols);
    for (int i = 0; i < rows; i++) {
        toka_weight_row(whole, row + i, want), toka_weight_row(part, i, got);
        for (int j = 0; j < cols; j++)
            CHECK_MSG(want[col + j] == got[j] || (isnan(want[col + j]) && isnan(got[j])), "row %d column %d: %g, not %g", i, j, got[j], want[col + j]);
    }
}

/* Tensor ranks cut quantized matrices and experts. */
static void test_mf_slices(void) {
    arena a = {0};
    toka_err e;
    toka_shape shape = {.L = 1, .H = 4, .K = 2, .D = 8, .E = 32, .F = 64, .V = 8, .V_all = 8}, out;
    toka_moe moe = {.n_experts = 2, .top_k = 1};
    toka_mlp experts[2];
    toka_mla mla = {.latent = 8, .rope = 4, .nope = 4, .v = 6};
    toka_layer layer = {.moe = &moe, .mla = &mla};
    toka_weights w = {.layers = &layer}, slice;
    layer.q = mft_quantized(&a, TOKA_INT4, TOKA_PACK_GPTQ, 32, 32, 0, 1);
    layer.k = mft_quantized(&a, TOKA_INT4, TOKA_PACK_ROWS, 16, 32, 0, 1);
    layer.v = mft_quantized(&a, TOKA_FP8, TOKA_PACK_ROWS, 16, 32, 0, 1);
    layer.o = mft_quantized(&a, TOKA_INT4, TOKA_PACK_AWQ, 32, 32, 0, 1);
    mla.q_b = mft_quantized(&a, TOKA_FP8, TOKA_PACK_ROWS, 4 * 8, 24, 0, 1);
    mla.kv_b = mft_quantized(&a, TOKA_FP8, TOKA_PACK_ROWS, 4 * 10, 8, 0, 1);
    mla.kv_a = mft_quantized(&a, TOKA_FP8, TOKA_PACK_ROWS, 12, 32, 0, 1);
    moe.router = mft_quantized(&a, TOKA_FP8, TOKA_PACK_ROWS, 2, 32, 0, 1);
    moe.experts = experts;
    for (int x = 0; x < 2; x++)
        experts[x] = (toka_mlp){.gate = mft_quantized(&a, TOKA_MXFP4, TOKA_PACK_ROWS, 64, 32, 0, 2), .up = mft_quantized(&a, TOKA_MXFP4, TOKA_PACK_ROWS, 64, 32, 1, 2),
                                .down = mft_quantized(&a, TOKA_MXFP4, TOKA_PACK_ROWS, 32, 64, 0, 1)};
    for (int r = 0; r < 2; r++) {
        mf_rank rank = {.tp_rank = r, .tp_size = 2, .pp_size = 1};
        CHECK_MSG(!mf_shard(&shape, &w, &rank, &a, &out, &slice, &e), "%s", e.msg);
        const toka_layer *l = slice.layers;
        CHECK(out.H == 2 && out.K == 1 && out.F == 32 && l->moe != &moe && l->moe->top_k == 1 && l->mla->latent == 8);
        mft_check_slice(&layer.q, &l->q, 16 * r, 0, 16, 32);
        mft_check_slice(&layer.k, &l->k, 8 * r, 0, 8, 32);
        mft_check_slice(&layer.v, &l->v, 8 * r, 0, 8, 32);
        mft_check_slice(&layer.o, &l->o, 0, 16 * r, 32, 16);
        mft_check_slice(&mla.q_b, &l->mla->q_b, 16 * r, 0, 16, 24);
        mft_check_slice(&mla.kv_b, &l->mla->kv_b, 20 * r, 0, 20, 8);
        mft_check_slice(&mla.kv_a, &l->mla->kv_a, 0, 0, 12, 32);
        mft_check_slice(&moe.router, &l->moe->router, 0, 0, 2, 32);
        for (int x = 0; x < 2; x++) {
            mft_check_slice(&experts[x].gate, &l->moe->experts[x].gate, 32 * r, 0, 32, 32);
            mft_check_slice(&experts[x].up, &l->moe->experts[x].up, 32 * r, 0, 32, 32);
            mft_check_slice(&experts[x].down, &l->moe->experts[x].down, 0, 32 * r, 32, 32);
        }
    }
    shape.K = 4; /* four ranks, but two blocks of MXFP4 */
    CHECK(mf_shard(&shape, &w, &(mf_rank){.tp_size = 4, .pp_size = 1}, &a, &out, &slice, &e) == TOKA_E_USE &&
          strstr(e.msg, "tensor parallel size 4: an MLP or an expert has a width of 64, which can be cut after every 32 columns"));
    layer.o.cols = 4 * 6, shape.D = 6; /* heads that are no whole words */
    experts[0] = experts[1] = (toka_mlp){0};
    CHECK(mf_shard(&shape, &w, &(mf_rank){.tp_size = 4, .pp_size = 1}, &a, &out, &slice, &e) == TOKA_E_USE && strstr(e.msg, "6 of 24, expected a multiple of 8"));
    arena_free(&a);
}

/* Where the MLPs of quantized models are cut: between groups, else 32 columns, else words. */
static void test_mf_shares(void) {
    static const struct {
        toka_dtype dtype;
        int width, group, n_shares, first, last; /* the columns of the first and the last share */
    } cases[] = {
        {TOKA_BF16, 99, 1, 2, 49, 50},      {TOKA_INT4, 11008, 128, 4, 2688, 2816}, {TOKA_INT4, 512, 128, 2, 256, 256},
        {TOKA_INT4, 384, 128, 2, 192, 192}, {TOKA_INT4, 224, 32, 5, 40, 48},        {TOKA_INT4, 96, 32, 7, 8, 16},
        {TOKA_INT4, 4096, 4096, 3, 1344, 1376}, {TOKA_MXFP4, 2880, 32, 4, 704, 736}, {TOKA_MXFP4, 160, 32, 2, 64, 96},
        {TOKA_FP8, 1408, 128, 4, 256, 384}, {TOKA_FP8, 99, 128, 2, 49, 50},         {TOKA_FP8, 18432, 128, 8, 2304, 2304}};
    for (int i = 0; i < COUNT(cases); i++) {
        toka_quant quant = {.block_cols = cases[i].group};
        const toka_mlp mlp = {.down = {.dtype = cases[i].dtype, .rows = 1, .cols = cases[i].width, .quant = cases[i].dtype == TOKA_BF16 ? NULL : &quant}};
        const int n = cases[i].n_shares, unit = mf_mlp_unit(&mlp, n);
        int sum = 0;
        for (int k = 0; k < n; k++) {
            const mf_range share = mf_unit_share(cases[i].width, unit, k, n);
            CHECK(share.first == sum && share.count > 0);
            sum += share.count;
        }
        CHECK(sum == cases[i].width);
        CHECK_MSG(mf_unit_share(cases[i].width, unit, 0, n).count == cases[i].first && mf_unit_share(cases[i].width, unit, n - 1, n).count == cases[i].last,
                  "%d columns of %d ranks: unit %d", cases[i].width, n, unit);
    }
}

/* Fields that are not read may have Python's infinite numbers. Fields that are read are refused by
 * name. */
static void test_mf_infinity(void) {
    arena a = {0};
    mf_config c = {0};
    mf_defaults d;
    mf_model m = {0};
    toka_err e;
    str *files;
    st_alias_list *names = NULL;
    int n;
    if (mft_config(M_LLAMA ",\"time_step_limit\":[0.0,Infinity],\"x\":-Infinity,\"y\":{\"z\":NaN},\"w\":1e999}", NULL, &a, &c))
        CHECK(c.shape.E == 4096);
    mft_config(M_LLAMA ",\"rope_theta\":Infinity}", "rope_theta is inf, expected a number from", &a, &c);
    mft_config(M_LLAMA ",\"rms_norm_eps\":NaN}", "rms_norm_eps is nan, expected a number from", &a, &c);
    mft_config(M_LLAMA ",\"hidden_size\":-Infinity}", "hidden_size is -inf, expected a whole number", &a, &c);
    if (!mft_config(M_LLAMA "}", NULL, &a, &c)) return;
    CHECK(!mf_generation_parse(STR("{\"max_time\":Infinity,\"top_k\":5}"), "g", &a, &c, &d, &e) && d.top_k == 5);
    CHECK(mf_generation_parse(STR("{\"temperature\":Infinity}"), "g", &a, &c, &d, &e) && strstr(e.msg, "temperature is inf"));
    CHECK(!mf_tokenizer_config_parse(STR("{\"model_max_length\":Infinity,\"x\":[NaN,-Infinity],\"eos_token\":\"a\"}"), "t", &m.memory, &m, &e));
    CHECK(!strcmp(m.eos_token, "a"));
    CHECK(!mf_special_map_parse(STR("{\"x\":NaN,\"eos_token\":\"b\"}"), "t", &m.memory, &m, &e) && !strcmp(m.eos_token, "b"));
    CHECK(!st_index_parse(STR("{\"metadata\":{\"total_size\":Infinity},\"weight_map\":{\"a\":\"f.safetensors\"}}"), "i", &a, &files, &n,
                          &names, &e) && n == 1);
    arena_free(&a), arena_free(&m.memory);
}

static void test_mf_generation(void) {
    arena a = {0};
    mf_config c = {0};
    mf_defaults d;
    toka_err e;
    if (!mft_config(M_LLAMA "}", NULL, &a, &c)) return;
    const char *text = "{\"bos_token_id\":3,\"eos_token_id\":[4,6],\"do_sample\":true,\"temperature\":0.6,\"top_p\":0.95,"
                       "\"top_k\":20,\"repetition_penalty\":1.05,\"transformers_version\":\"4.51.0\"}";
    CHECK(mf_generation_parse(str_c(text), "g", &a, &c, &d, &e) == 0);
    CHECK(c.bos_id == 3 && c.n_eos_ids == 2 && c.eos_ids[1] == 6);
    CHECK(d.has_do_sample && d.do_sample && d.has_temperature && d.temperature == 0.6f && d.has_top_p && d.top_p == 0.95f);
    CHECK(d.has_top_k && d.top_k == 20 && d.has_repetition_penalty && d.repetition_penalty == 1.05f && !d.has_min_p);
    CHECK(mf_generation_parse(STR("{}"), "g", &a, &c, &d, &e) == 0);
    CHECK(c.bos_id == 3 && c.n_eos_ids == 2 && !d.has_top_k && !d.has_temperature && d.temperature == 1 && d.top_p == 1);
    CHECK(!d.max_tokens && !d.min_tokens && !d.n_stop && !d.n_bad && !d.unused);
    CHECK(mf_generation_parse(STR("{\"top_p\":0}"), "g", &a, &c, &d, &e) == 0 && d.has_top_p && d.top_p > 0 && d.top_p < 1e-30f);
    CHECK(mf_generation_parse(STR("{\"temperature\":-1}"), "g", &a, &c, &d, &e) && strstr(e.msg, "temperature is -1"));
    CHECK(mf_generation_parse(STR("{\"eos_token_id\":{}}"), "g", &a, &c, &d, &e) &&
          strstr(e.msg, "eos_token_id is an object"));
    arena_free(&a);
}

/* Lengths, stop strings and bad words of generation_config.json. want: words of an error. */
static void test_mf_generation_requests(void) {
    static const struct { const char *text, *want; } bad[] = {
        {"{\"max_new_tokens\":0}", "g: max_new_tokens is 0, expected 1 or more"},
        {"{\"max_new_tokens\":-3}", "g: max_new_tokens is -3, expected 1 or more"},
        {"{\"max_new_tokens\":\"5\"}", "g: max_new_tokens is \"5\", expected a whole number"},
        {"{\"max_new_tokens\":2.5}", "g: max_new_tokens is 2.5, expected a whole number"},
        {"{\"min_new_tokens\":-1}", "g: min_new_tokens is -1, expected 0 to max_new_tokens"},
        {"{\"min_new_tokens\":6,\"max_new_tokens\":5}", "g: min_new_tokens is 6, expected 0 to max_new_tokens"},
        {"{\"stop_strings\":1}", "g: stop_strings is 1, expected a text or a list of texts"},
        {"{\"stop_strings\":[\"a\",\"\"]}", "g: stop_strings is \"\", expected"},
        {"{\"stop_strings\":[\"a\\u0000\"]}", "g: stop_strings is \"a"},
        {"{\"stop_strings\":[[\"a\"]]}", "g: stop_strings is an array, expected"},
        {"{\"bad_words_ids\":7}", "g: bad_words_ids is 7, expected a list of lists of token ids"},
        {"{\"bad_words_ids\":[7]}", "g: bad_words_ids is an array, expected"},
        {"{\"bad_words_ids\":[[]]}", "g: bad_words_ids is an array, expected"},
        {"{\"bad_words_ids\":[[-1]]}", "g: bad_words_ids is an array, expected"},
        {"{\"bad_words_ids\":[[\"x\"]]}", "g: bad_words_ids is an array, expected"}};
    arena a = {0};
    mf_config c = {0};
    mf_defaults d;
    toka_err e;
    if (!mft_config(M_LLAMA "}", NULL, &a, &c)) return;
    for (int i = 0; i < COUNT(bad); i++)
        CHECK_MSG(mf_generation_parse(str_c(bad[i].text), "g", &a, &c, &d, &e) == TOKA_E_INPUT && strstr(e.msg, bad[i].want),
                  "%s: %s", bad[i].text, e.code ? e.msg : "no error");
    const char *text = "{\"max_new_tokens\":50,\"min_new_tokens\":4,\"stop_strings\":[\"END\",\"\\u00e9\"],"
                       "\"bad_words_ids\":[[5,6],[2],[7],[99999999]],\"eos_token_id\":2}";
    CHECK(mf_generation_parse(str_c(text), "g", &a, &c, &d, &e) == 0);
    CHECK(d.max_tokens == 50 && d.min_tokens == 4 && d.n_stop == 2 && !strcmp(d.stop[1], "\xC3\xA9") && !d.unused);
    /* without the end id and without the id outside the vocabulary */
    CHECK(d.n_bad == 2 && d.bad_lengths[0] == 2 && d.bad_lengths[1] == 1);
    CHECK(d.bad_ids[0] == 5 && d.bad_ids[1] == 6 && d.bad_ids[2] == 7);
    CHECK(mf_generation_parse(STR("{\"stop_strings\":\"END\",\"max_new_tokens\":null,\"bad_words_ids\":[]}"), "g", &a, &c, &d, &e) == 0);
    CHECK(d.n_stop == 1 && !d.max_tokens && !d.n_bad);
    CHECK(mf_generation_parse(STR("{\"max_new_tokens\":99999999999}"), "g", &a, &c, &d, &e) == 0 && d.max_tokens == INT_MAX);
    arena_free(&a);
}

/* A warning names an unused field if it asks for something, and only then. */
static void test_mf_generation_unused(void) {
    static const struct { const char *text, *want; } cases[] = {
        {"{\"max_length\":20}", "max_length"},
        {"{\"max_length\":20,\"max_new_tokens\":5}", NULL},
        {"{\"max_length\":2048}", NULL}, /* the model's own length */
        {"{\"min_length\":5,\"num_beams\":4,\"no_repeat_ngram_size\":3}", "min_length, num_beams, no_repeat_ngram_size"},
        {"{\"min_length\":0,\"num_beams\":1,\"typical_p\":1.0,\"length_penalty\":1,\"early_stopping\":false,"
         "\"forced_eos_token_id\":null,\"suppress_tokens\":[],\"guidance_scale\":1.0,\"num_return_sequences\":1}", NULL},
        {"{\"suppress_tokens\":[5],\"begin_suppress_tokens\":[6],\"forced_bos_token_id\":0}",
         "suppress_tokens, begin_suppress_tokens, forced_bos_token_id"},
        {"{\"early_stopping\":true,\"watermarking_config\":{\"bias\":2}}", "early_stopping, watermarking_config"},
        {"{\"use_cache\":true,\"transformers_version\":\"5.0\",\"pad_token_id\":0,\"_from_model_config\":true}", NULL}};
    arena a = {0};
    mf_config c = {0};
    mf_defaults d;
    toka_err e;
    if (!mft_config(M_LLAMA "}", NULL, &a, &c)) return;
    for (int i = 0; i < COUNT(cases); i++) {
        CHECK(mf_generation_parse(str_c(cases[i].text), "g", &a, &c, &d, &e) == 0);
        const bool same = d.unused && cases[i].want ? !strcmp(d.unused, cases[i].want) : !d.unused && !cases[i].want;
        CHECK_MSG(same, "%s: %s", cases[i].text, d.unused ? d.unused : "none");
    }
    arena_free(&a);
}

static void test_mf_tokenizer_config(void) {
    mf_model m = {0};
    toka_err e;
    CHECK(mf_tokenizer_config_parse(STR("{\"bos_token\":{\"content\":\"<s>\",\"lstrip\":false},\"eos_token\":\"</s>\","
                                        "\"pad_token\":null,\"chat_template\":\"{{ \\u00e9 }}\\n\"}"), "t", &m.memory, &m,
                                    &e) == 0);
    CHECK(strcmp(m.bos_token, "<s>") == 0 && strcmp(m.eos_token, "</s>") == 0 && !m.pad_token && !m.unk_token);
    CHECK(str_is(mf_template_named(&m, "default"), "{{ \xC3\xA9 }}\n"));
    CHECK(mf_tokenizer_config_parse(STR("{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"A\"},"
                                        "{\"name\":\"default\",\"template\":\"B\"}]}"), "t", &m.memory, &m, &e) == 0);
    CHECK(str_is(mf_template_named(&m, "default"), "B") && str_is(mf_template_named(&m, "tool_use"), "A") && !m.bos_token);
    CHECK(mf_tokenizer_config_parse(STR("{\"chat_template\":[{\"name\":\"rag\",\"template\":\"A\"}]}"), "t", &m.memory, &m,
                                    &e) == 0);
    CHECK(mf_template_named(&m, "default").n == 0 && mf_template_named(&m, "tool_use").n == 0);
    CHECK(mf_tokenizer_config_parse(STR("{\"bos_token\":[]}"), "t", &m.memory, &m, &e) &&
          strstr(e.msg, "bos_token is an array"));
    CHECK(mf_tokenizer_config_parse(STR("{\"chat_template\":1}"), "t", &m.memory, &m, &e) &&
          strstr(e.msg, "chat_template is 1"));
    for (int i = 0; i < COUNT(mf_archs); i++) { /* fix_mistral_regex counts in two rows */
        m.config.arch = &mf_archs[i];
        CHECK(!mf_tokenizer_config_parse(STR("{\"fix_mistral_regex\":true}"), "t", &m.memory, &m, &e));
        const bool counts = strstr(arena_cstr(&m.memory, m.token_flags), "\"fix_mistral_regex\":true");
        CHECK(counts == (str_is(str_c(m.config.arch->model_type), "mistral") || str_is(str_c(m.config.arch->model_type), "ministral")));
    }
    arena_free(&m.memory);
}

/* ---- A tiny Llama with L=2 E=8 H=2 K=1 D=4 F=6 V=10, bf16 zeros, the embedding first; tests spoil
 * it ---- */

static const char mft_tiny_config[] = M_LLAMA ",\"num_hidden_layers\":2,\"hidden_size\":8,\"num_attention_heads\":2,"
    "\"num_key_value_heads\":1,\"intermediate_size\":6,\"vocab_size\":10,\"max_position_embeddings\":32}";

static const struct {
    const char *name;
    int rows, cols; /* rows 0: a vector */
} mft_tiny_tensors[] = {
    {"model.embed_tokens.weight", 10, 8}, {"model.norm.weight", 0, 8}, {"lm_head.weight", 10, 8},
    {"model.layers.0.input_layernorm.weight", 0, 8}, {"model.layers.0.post_attention_layernorm.weight", 0, 8},
    {"model.layers.0.self_attn.q_proj.weight", 8, 8}, {"model.layers.0.self_attn.k_proj.weight", 4, 8},
    {"model.layers.0.self_attn.v_proj.weight", 4, 8}, {"model.layers.0.self_attn.o_proj.weight", 8, 8},
    {"model.layers.0.mlp.gate_proj.weight", 6, 8}, {"model.layers.0.mlp.up_proj.weight", 6, 8},
    {"model.layers.0.mlp.down_proj.weight", 8, 6},
    {"model.layers.1.input_layernorm.weight", 0, 8}, {"model.layers.1.post_attention_layernorm.weight", 0, 8},
    {"model.layers.1.self_attn.q_proj.weight", 8, 8}, {"model.layers.1.self_attn.k_proj.weight", 4, 8},
    {"model.layers.1.self_attn.v_proj.weight", 4, 8}, {"model.layers.1.self_attn.o_proj.weight", 8, 8},
    {"model.layers.1.mlp.gate_proj.weight", 6, 8}, {"model.layers.1.mlp.up_proj.weight", 6, 8},
    {"model.layers.1.mlp.down_proj.weight", 8, 6},
};
enum { MFT_PARAMETERS = 80 + 8 + 80 + 2 * (16 + 64 + 32 + 32 + 64 + 3 * 48) };

/* Writes the header of tensors from .. to-1. Returns the number of their bytes. */
static size_t mft_tiny_header(int from, int to, buf *h) {
    size_t at = 0;
    buf_char(h, '{');
    for (int i = from; i < to; i++) {
        size_t bytes = 2 * (size_t)mft_tiny_tensors[i].cols * (size_t)MAX(mft_tiny_tensors[i].rows, 1);
        buf_printf(h, "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":[", i > from ? "," : "", mft_tiny_tensors[i].name);
        if (mft_tiny_tensors[i].rows) buf_printf(h, "%d,", mft_tiny_tensors[i].rows);
        buf_printf(h, "%d],\"data_offsets\":[%zu,%zu]}", mft_tiny_tensors[i].cols, at, at + bytes);
        at += bytes;
    }
    buf_char(h, '}');
    return at;
}

static void mft_replace(buf *b, const char *from, const char *to) {
    ptrdiff_t at = str_find(buf_view(b), str_c(from), 0);
    CHECK_MSG(at >= 0, "the test looks for %s", from);
    if (at < 0) return;
    buf out = {0};
    buf_put(&out, b->p, (size_t)at), buf_c(&out, to);
    buf_put(&out, b->p + at + strlen(from), b->n - (size_t)at - strlen(from));
    buf_free(b);
    *b = out;
}

/* Writes length, header (padded so that the data begins at a multiple of 8, plus `odd`) and
 * zeros. */
static void mft_tiny_file(buf *out, buf *header, size_t data_bytes, size_t odd) {
    while (header->n % 8 != odd % 8) buf_char(header, ' ');
    for (int i = 0; i < 8; i++) buf_char(out, (char)(header->n >> 8 * i));
    buf_str(out, buf_view(header));
    for (size_t i = 0; i < data_bytes; i++) buf_char(out, 0);
}

static void mft_write_file(const char *folder, const char *name, str text) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    CHECK_MSG(f, "%s", path);
    if (f && text.n) fwrite(text.p, 1, text.n, f);
    if (f) fclose(f);
}

static char *mft_temp_folder(char path[64]) {
    strcpy(path, "/tmp/toka_mf_XXXXXX");
    CHECK(mkdtemp(path) != NULL);
    return path;
}
static void mft_remove_folder(const char *path) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    CHECK(system(command) == 0);
}

/* ---- What tokenizer_config.json adds to texts, and the name of a folder ---- */

/* Makes a folder with the embedded model's files, without its weights and tokenizer_config.json. */
static void mft_model_folder(char folder[64]) {
    char here[512], command[2048];
    mft_temp_folder(folder);
    CHECK(getcwd(here, sizeof here) != NULL);
    snprintf(command, sizeof command, "ln -s '%s'/test/model/config.json '%s'/test/model/generation_config.json '%s'/test/model/tokenizer.json %s",
             here, here, here, folder);
    CHECK(system(command) == 0);
}

/* The embedded model's files with another tokenizer_config.json. want: the ids of "1" (shown as T)
 * and of what is put around it, or words of an error. */
static void mft_surrounds(const char *config, const char *want, int n_ends, int32_t last_end) {
    char folder[64];
    mft_model_folder(folder);
    mft_write_file(folder, "tokenizer_config.json", str_c(config));
    toka *t;
    toka_err e = {0};
    toka_options o = toka_options_default();
    buf got = {0};
    ids v = {0};
    o.model = folder;
    if (lib_open_text(&t, &o, false, &e)) buf_printf(&got, "%s", e.msg);
    else {
        int32_t one = tok_id(t->tokenizer, STR("1"));
        CHECK(one >= 0 && !tok_encode(t->tokenizer, STR("1"), TOKA_ADD_SPECIAL, &v, &e));
        for (size_t i = 0; i < v.n; i++) v.p[i] == one ? buf_c(&got, "T ") : buf_printf(&got, "%d ", (int)v.p[i]);
        const mf_config *c = &t->files->config;
        CHECK_MSG(c->n_eos_ids == n_ends && c->eos_ids[n_ends - 1] == last_end, "%s: %d ends", config, c->n_eos_ids);
        toka_close(t);
    }
    CHECK_MSG(n_ends ? str_is(buf_view(&got), want) : strstr(got.p, want) != NULL, "%s: %s, not %s", config, got.p, want);
    buf_free(&got), ids_free(&v);
    mft_remove_folder(folder);
}

static void mft_around_texts(void) {
#define MFT_NAMES "\"bos_token\":\"<|im_start|>\",\"eos_token\":{\"content\":\"<|im_end|>\"},\"tokenizer_class\":"
    mft_surrounds("{" MFT_NAMES "\"PreTrainedTokenizerFast\",\"add_bos_token\":true,\"add_eos_token\":true}", "0 T ", 2, 1);
    mft_surrounds("{" MFT_NAMES "\"LlamaTokenizerFast\"}", "0 T ", 2, 1);
    mft_surrounds("{" MFT_NAMES "\"LlamaTokenizerFast\",\"add_bos_token\":true,\"add_eos_token\":false}", "2 T ", 2, 1);
    mft_surrounds("{" MFT_NAMES "\"LlamaTokenizer\",\"add_bos_token\":false,\"add_eos_token\":true}", "T 3 ", 2, 1);
    mft_surrounds("{" MFT_NAMES "\"GemmaTokenizer\",\"add_bos_token\":null,\"add_eos_token\":true}", "0 T 3 ", 2, 1);
    /* this tokenizer has no such token */
    mft_surrounds("{\"tokenizer_class\":\"LlamaTokenizerFast\",\"add_bos_token\":true}", "T ", 2, 1);
    mft_surrounds("{\"tokenizer_class\":\"LlamaTokenizerFast\",\"add_bos_token\":true,\"bos_token\":\"<none>\"}", "1024 T ", 2, 1);
    mft_surrounds("{\"tokenizer_class\":\"LlamaTokenizerFast\",\"add_bos_token\":1}", "add_bos_token is 1, expected true or false", 0, 0);
    /* it ends an answer, in addition to the end ids of generation_config.json */
    mft_surrounds("{\"eos_token\":\"<|im_start|>\"}", "0 T ", 3, 2);
    mft_surrounds("{\"eos_token\":\"<none>\"}", "0 T ", 2, 1);
}

/* The four special tokens of the embedded model's folder with these files; "-": none. The first
 * token is named <|endoftext|> here. */
static void mft_special_tokens(const char *config, const char *map, const char *want) {
    char folder[64], command[256];
    mft_model_folder(folder);
    snprintf(command, sizeof command, "cd %s && sed 's/<|begin_of_text|>/<|endoftext|>/g' tokenizer.json >t && mv t tokenizer.json", folder);
    CHECK(system(command) == 0);
    if (config) mft_write_file(folder, "tokenizer_config.json", str_c(config));
    if (map) mft_write_file(folder, "special_tokens_map.json", str_c(map));
    toka *t;
    toka_err e = {0};
    toka_options o = toka_options_default();
    buf got = {0};
    o.model = folder;
    if (lib_open_text(&t, &o, false, &e)) buf_printf(&got, "%s", e.msg);
    else {
        for (int i = 0; i < 4; i++) buf_printf(&got, "%s ", *mf_special_field(t->files, i) ? *mf_special_field(t->files, i) : "-");
        toka_close(t);
    }
    CHECK_MSG(strstr(got.p, want) != NULL, "%s %s: %s, not %s", config ? config : "", map ? map : "", got.p, want);
    buf_free(&got);
    mft_remove_folder(folder);
}

/* special_tokens_map.json is used if tokenizer_config.json has no list of added tokens. Tokenizer
 * classes have default tokens, which the files replace. The same as transformers 4.57 and 5.24. */
static void mft_specials(void) {
    const char *map = "{\"bos_token\":\"<|im_start|>\",\"eos_token\":{\"content\":\"<|im_end|>\"},\"pad_token\":null,\"additional_special_tokens\":[\"x\"]}";
    mft_special_tokens("{}", map, "<|im_start|> <|im_end|> - - ");
    mft_special_tokens(NULL, map, "<|im_start|> <|im_end|> - - ");
    mft_special_tokens("{\"eos_token\":\"a\",\"pad_token\":\"b\",\"unk_token\":\"c\"}", map, "<|im_start|> <|im_end|> - c ");
    mft_special_tokens("{\"eos_token\":\"a\",\"added_tokens_decoder\":{}}", map, "- a - - ");
    mft_special_tokens("{}", NULL, "- - - - ");
    mft_special_tokens("{}", "{\"bos_token\":1}", "bos_token is 1, expected a string or an object with content");
    mft_special_tokens("{\"tokenizer_class\":\"Qwen2TokenizerFast\"}", NULL, "- <|endoftext|> <|endoftext|> <|endoftext|> ");
    mft_special_tokens("{\"tokenizer_class\":\"Qwen2Tokenizer\",\"pad_token\":null,\"eos_token\":\"<|im_end|>\"}", NULL, "- <|im_end|> - <|endoftext|> ");
    /* this tokenizer has no <s> */
    mft_special_tokens("{\"tokenizer_class\":\"LlamaTokenizer\"}", NULL, "- - - - ");
}

/* added_tokens_decoder takes precedence over the added tokens of tokenizer.json, and adds tokens in
 * the order of its ids, as in transformers 4.57 and 5.24. */
static void mft_added_tokens(void) {
    char folder[64];
    mft_model_folder(folder);
    mft_write_file(folder, "tokenizer_config.json", STR("{\"added_tokens_decoder\":{\"90001\":{\"content\":\"<|y|>\",\"special\":true},"
                   "\"3\":{\"content\":\"<|im_end|>\",\"special\":true,\"rstrip\":true},\"90000\":{\"content\":\"<|x|>\",\"special\":true}}}"));
    toka *t;
    toka_err e = {0};
    toka_options o = toka_options_default();
    ids v = {0};
    o.model = folder;
    CHECK(!lib_open_text(&t, &o, false, &e));
    CHECK(!tok_encode(t->tokenizer, STR("<|x|><|im_end|> \n 1<|y|>"), TOKA_PARSE_SPECIAL, &v, &e));
    CHECK(v.n == 4 && v.p[1] == 3 && v.p[2] == tok_id(t->tokenizer, STR("1")) && v.p[0] >= t->shape.V && v.p[3] == v.p[0] + 1);
    ids_free(&v), toka_close(t);
    mft_write_file(folder, "tokenizer_config.json", STR("{\"added_tokens_decoder\":{\"-------------------------\":{\"content\":\"a\"},\"3\":{\"special\":true}}}"));
    CHECK(lib_open_text(&t, &o, false, &e) == TOKA_E_INPUT && strstr(e.msg, "no content"));
    mft_remove_folder(folder);
}

/* Files next to the embedded model's tokenizer.json, which has 1,024 ids. Expected: the ids of a
 * text, and their text without special tokens, or words of an error. The same as transformers 4.57
 * and 5.24; where these differ, it is stated. */
static const struct { const char *config, *map, *added, *text, *ids, *shown; } mft_named[] = {
    {"{\"sep_token\":\"<sep>\",\"image_token\":\"<img>\",\"extra_special_tokens\":{\"z\":\"<z>\",\"im\":\"<im>\"},\"additional_special_tokens\":[\"<a>\"],"
     /* the order of 5.24 */
     "\"mask_token\":\"<m>\",\"add_bos_token\":false}", NULL, NULL, "<sep><m><img><z><im><a>", "1024 1025 1026 1027 1028 1029", ""},
    {"{\"model_specific_special_tokens\":{\"im_token\":\"<im>\",\"image_token\":\"<x>\"}}", NULL, NULL, "<x><im>", "1025 1024", ""},
    {"{\"model_specific_special_tokens\":7}", NULL, NULL, "", NULL, "model_specific_special_tokens is 7, expected a list of strings"},
    {"{\"extra_special_tokens\":[\"<z>\",{\"content\":\"<a>\",\"lstrip\":true}]}", NULL, NULL, "<z> \n<a>", "1024 1025", ""},
    {"{}", "{\"additional_special_tokens\":[\"<a>\",{\"content\":\"<x>\"}],\"sep_token\":\"<y>\"}", NULL, "<x><y><a>", "1026 1024 1025", ""},
    {"{\"additional_special_tokens\":[\"<b>\"]}", "{\"additional_special_tokens\":[\"<a>\",\"<b>\"],\"sep_token\":null}", NULL, "<a><b>", "1025 1024", ""},
    /* the map is not used */
    {"{\"sep_token\":\"<b>\",\"added_tokens_decoder\":{}}", "{\"sep_token\":\"<a>\"}", NULL, "<b>", "1024", ""},
    {"{\"sep_token\":\"<b>\"}", "{\"sep_token\":\"<a>\"}", NULL, "<a>1", "1024 20", "1"},
    {"{\"sep_token\":\"<q>\"}", NULL, "{\"<p>\":1030,\"<q>\":1029}", "<p><q> x", "1025 1024 224 91", "<p> x"},
    {"{\"sep_token\":\"<q>\",\"added_tokens_decoder\":{}}", NULL, "{\"<p>\":1030}", "<q><p", "1024 31 83", "<p"},
    {"{\"sep_token\":\"hello\",\"added_tokens_decoder\":{\"4\":{\"content\":\"hello\",\"special\":false,\"normalized\":true}}}", NULL, NULL,
     "a hello b", "68 224 1024 281", "a  b"},
    {"{\"sep_token\":\"apples\"}", NULL, NULL, "apples", "1024", ""},
    {"{\"pad_token\":\"ap\"}", NULL, NULL, "ap", "777", ""}, /* of the vocabulary */
    /* normalized */
    {"{\"added_tokens_decoder\":{\"9\":{\"content\":\"e\u0301\",\"special\":false}}}", NULL, NULL, "a \xC3\xA9", "68 224 1024", NULL},
    /* remains special */
    {"{\"added_tokens_decoder\":{\"2\":{\"content\":\"<|im_start|>\",\"special\":false}}}", NULL, NULL, "<|im_start|>", "2", ""},
    {"{\"split_special_tokens\":true}", NULL, NULL, "<|im_start|>user", "31 95 415 66 332 297 87 95 33 298", "<|im_start|>user"},
    {"{\"split_special_tokens\":true,\"added_tokens_decoder\":{\"9\":{\"content\":\"hello\",\"special\":false}}}", NULL, NULL, "hello", "1024", "hello"},
    {"{\"split_special_tokens\":false,\"add_bos_token\":true,\"legacy\":false,\"do_lower_case\":true}", NULL, NULL, "<|im_start|>", "2", ""},
    {"{\"sep_token\":5}", NULL, NULL, "", NULL, "sep_token is 5, expected a string or an object with content"},
    {"{}", "{\"cls_token\":[]}", NULL, "", NULL, "special_tokens_map.json: cls_token is an array"},
    {"{\"additional_special_tokens\":\"<a>\"}", NULL, NULL, "", NULL, "additional_special_tokens is \"<a>\", expected a list of strings"},
    {"{\"additional_special_tokens\":[\"a\",7]}", NULL, NULL, "", NULL, "additional_special_tokens is 7, expected a list of strings"},
    {"{\"extra_special_tokens\":{\"a\":{}}}", NULL, NULL, "", NULL, "extra_special_tokens is an object, expected a list of strings"},
    {"{\"split_special_tokens\":\"yes\"}", NULL, NULL, "", NULL, "split_special_tokens is \"yes\", expected true or false"},
    {"{\"add_prefix_space\":1}", NULL, NULL, "", NULL, "add_prefix_space is 1, expected true or false"},
    {"{\"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output\":true}", NULL, NULL, "", NULL, "output is true, expected false: toka leaves"},
    {"{\"fast_tokenizer_files\":[\"tokenizer.4.0.0.json\"]}", NULL, NULL, "", NULL, "fast_tokenizer_files is an array, expected none"},
    {"{}", NULL, "[]", "", NULL, "added_tokens.json: not a JSON object"},
};

static void mft_named_tokens(void) {
    for (int i = 0; i < COUNT(mft_named); i++) {
        char folder[64];
        mft_model_folder(folder);
        mft_write_file(folder, "tokenizer_config.json", str_c(mft_named[i].config));
        if (mft_named[i].map) mft_write_file(folder, "special_tokens_map.json", str_c(mft_named[i].map));
        if (mft_named[i].added) mft_write_file(folder, "added_tokens.json", str_c(mft_named[i].added));
        toka *t;
        toka_err e = {0};
        toka_options o = toka_options_default();
        ids v = {0};
        buf got = {0}, shown = {0};
        o.model = folder;
        if (lib_open_text(&t, &o, false, &e)) {
            CHECK_MSG(!mft_named[i].ids && strstr(e.msg, mft_named[i].shown), "%s: %s", mft_named[i].config, e.msg);
        } else {
            CHECK(!tok_encode(t->tokenizer, str_c(mft_named[i].text), TOKA_PARSE_SPECIAL, &v, &e));
            for (size_t k = 0; k < v.n; k++) buf_printf(&got, k ? " %d" : "%d", v.p[k]);
            CHECK_MSG(mft_named[i].ids && str_is(buf_view(&got), mft_named[i].ids), "%s: %s", mft_named[i].config, got.p);
            CHECK(!tok_decode(t->tokenizer, v.p, v.n, TOKA_SKIP_SPECIAL, &shown, &e));
            if (mft_named[i].shown) CHECK_MSG(str_is(buf_view(&shown), mft_named[i].shown), "%s: %s", mft_named[i].config, shown.p);
            toka_close(t);
        }
        ids_free(&v), buf_free(&got), buf_free(&shown);
        mft_remove_folder(folder);
    }
}

static void mft_folder_names(void) {
    char folder[64], path[200], real[4096];
    arena a = {0};
    mft_temp_folder(folder);
    snprintf(path, sizeof path, "mkdir %s/v1 && ln -s v1 %s/current", folder, folder);
    CHECK(system(path) == 0);
    static const char *const ends[] = {"", "/", "//", "/.", "/./", "/././"};
    for (int i = 0; i < COUNT(ends); i++) {
        snprintf(path, sizeof path, "%s/current%s", folder, ends[i]);
        CHECK_MSG(!strcmp(mf_folder_name(path, &a), "current"), "%s: %s", path, mf_folder_name(path, &a));
    }
    snprintf(path, sizeof path, "%s/current/..", folder);
    CHECK(!strcmp(mf_folder_name(path, &a), folder + strlen("/tmp/")) && !strcmp(mf_folder_name("test", &a), "test") && !strcmp(mf_folder_name("/", &a), "/"));
    CHECK(realpath(".", real) != NULL);
    for (int i = 0; i < 3; i++) CHECK(!strcmp(mf_folder_name((const char *[]){".", "./", "test/.."}[i], &a), strrchr(real, '/') + 1));
    arena_free(&a);
    mft_remove_folder(folder);
}

/* One way to spoil the tiny model. */
typedef struct mft_spoil {
    const char *config_from, *config_to; /* replacement in config.json */
    const char *from, *to; /* replacement in the header */
    long cut; /* number of bytes of the file to keep, if not 0; negative: bytes to cut off */
    int more; /* data bytes to add */
    int odd; /* the data begins this far from a multiple of 8 */
    const char *want; /* words of the message; NULL: it opens */
} mft_spoil;

#define M_EMBED "\"model.embed_tokens.weight\":{\"dtype\":\"BF16\",\"shape\":[10,8],\"data_offsets\":[0,160]}"
#define M_NORM "\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[8],\"data_offsets\":[160,176]}"
#define M_NORM_IS(dtype, shape, offsets) \
    "\"model.norm.weight\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static const mft_spoil mft_spoils[] = {
    {.want = NULL},
    {.from = "{\"model", .to = "{\"__metadata__\":{\"format\":\"pt\"},\"model", .want = NULL},
    {.from = "{\"model", .to = "{\"__metadata__\":null,\"model", .want = NULL},
    {.from = "{\"model", .to = "{\"__metadata__\":{\"n\":1},\"model", .want = "__metadata__ is not an object of strings"},
    {.from = "{\"model", .to = "{\"__metadata__\":[],\"model", .want = "__metadata__ is not an object of strings"},
    {.from = "{\"model", .to = " {\"model", .want = "the header does not begin with {"},
    {.from = "{\"model", .to = "[\"model", .want = "the header does not begin with {"},
    {.from = "{\"model", .to = "{\"a\":{\"b\":{\"c\":{}}},\"model", .want = "nested too deep"},
    {.from = "{\"model", .to = "{\"a\":1,\"model", .want = "a: dtype \"\" is not known"},
    {.from = "\"shape\"", .to = "\"shape\":", .want = "value expected"},
    /* the header may have any order */
    {.from = M_EMBED "," M_NORM, .to = M_NORM "," M_EMBED, .want = NULL},
    /* offsets */
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[8]", "[152,168]"),
     .want = "begin at 152, expected 160, they overlap another tensor"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[8]", "[0,16]"), .want = "they overlap another tensor"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[8]", "[168,184]"),
     .want = "begin at 168, expected 160, there is a hole before them"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[8]", "[1000000,1000016]"), .want = "there is a hole before"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[8]", "[176,160]"), .want = "data_offsets are not [begin, end]"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[8]", "[-16,0]"), .want = "data_offsets are not [begin, end]"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[8]", "[160]"), .want = "data_offsets are not [begin, end]"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[8]", "[160,176,192]"), .want = "data_offsets are not [begin, end]"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[8]", "[160.0,176]"), .want = "data_offsets are not [begin, end]"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[8]", "[18446744073709551600,18446744073709551616]"),
     .want = "data_offsets are not"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[8]", "[160,178]"),
     .want = "data_offsets span 18 bytes, shape and dtype need 16"},
    {.more = 2, .want = "the tensors end at byte 1744 of the data, which has 1746"},
    /* shapes and dtypes */
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[4,2]", "[160,176]"), .want = "model.norm.weight: [4,2], expected [8]"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[1,8]", "[160,176]"), .want = "model.norm.weight: [1,8], expected [8]"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[8,1]", "[160,176]"), .want = "model.norm.weight: [8,1], expected [8]"},
    {.from = M_EMBED, .to = "\"model.embed_tokens.weight\":{\"dtype\":\"F32\",\"shape\":[10,4],\"data_offsets\":[0,160]}",
     .want = "model.embed_tokens.weight: [10,4], expected [10,8]"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[2,2,2]", "[160,176]"), .want = "model.norm.weight: [2,2,2], expected [8]"},
    {.from = M_NORM, .to = M_NORM_IS("F32", "[4]", "[160,176]"), .want = "model.norm.weight: [4], expected [8]"},
    {.from = "[4,8]", .to = "[8,4]", .want = "model.layers.0.self_attn.k_proj.weight: [8,4], expected [4,8]"},
    {.from = M_NORM, .to = M_NORM_IS("I16", "[8]", "[160,176]"),
     .want = "model.norm.weight: dtype I16, expected BF16, F16 or F32"},
    {.from = M_NORM, .to = M_NORM_IS("Q4_K", "[8]", "[160,176]"), .want = "model.norm.weight: dtype \"Q4_K\" is not known"},
    {.from = M_NORM, .to = M_NORM_IS("F16", "[8]", "[160,176]"), .want = NULL},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[-8]", "[160,176]"), .want = "shape is not a list of counts"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "8", "[160,176]"), .want = "shape is not a list of counts"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[4611686018427387904,4]", "[160,160]"),
     .want = "shape is not a list of counts"},
    {.from = M_NORM, .to = M_NORM_IS("BF16", "[2147483648,2147483648]", "[160,176]"),
     .want = "shape is not a list of counts"},
    {.from = M_NORM, .to = M_NORM_IS("F4", "[3]", "[160,176]"), .want = "shape and dtype need 2"},
    {.from = M_NORM, .to = M_NORM_IS("F4", "[33]", "[160,176]"), .want = "span 16 bytes, shape and dtype need 17"},
    {.from = M_NORM, .to = M_NORM ",\"x\":{\"dtype\":\"I64\",\"shape\":[0,7],\"data_offsets\":[176,176]}", .want = NULL},
    {.from = M_NORM, .to = "\"model.norm.weight\":7", .want = "model.norm.weight: dtype \"\" is not known"},
    {.from = M_EMBED, .to = "\"model.embed_tokens.weight\":{\"dtype\":\"BF16\",\"shape\":[20,4],\"data_offsets\":[0,160]}",
     .want = "model.embed_tokens.weight: [20,4], expected [10,8]"},
    /* names */
    {.from = "model.norm.weight", .to = "model.embed_tokens.weight", .want = "model.embed_tokens.weight is there twice"},
    {.from = "model.norm.weight", .to = "norm.weight", .want = "model.norm.weight: missing"},
    {.from = "layers.1.mlp.up_proj", .to = "layers.2.mlp.up_proj", .want = "model.layers.1.mlp.up_proj.weight: missing"},
    {.from = "lm_head.weight", .to = "lm_head.extra", .want = "lm_head.weight: missing"},
    {.from = "lm_head.weight", .to = "rotary_emb.inv_freq", .config_from = "{",
     .config_to = "{\"tie_word_embeddings\":true,"},
    {.config_from = "\"num_hidden_layers\":2", .config_to = "\"num_hidden_layers\":3",
     .want = "model.layers.2.input_layernorm.weight: missing"},
    {.config_from = "\"num_hidden_layers\":2", .config_to = "\"num_hidden_layers\":1"},
    {.config_from = "{", .config_to = "{\"attention_bias\":true,", .want = "model.layers.0.self_attn.q_proj.bias: missing"},
    {.config_from = "LlamaForCausalLM", .config_to = "Qwen3ForCausalLM\"],\"head_dim\":4,\"x\":[\"",
     .want = "model.layers.0.self_attn.q_norm.weight: missing"},
    {.config_from = "\"num_key_value_heads\":1", .config_to = "\"num_key_value_heads\":2",
     .want = "model.layers.0.self_attn.k_proj.weight: [4,8], expected [8,8]"},
    /* lengths */
    {.odd = 1, .want = NULL},
    {.odd = 2, .want = NULL},
    {.cut = -2, .want = "lie outside the file's 1742 bytes of data"},
    {.cut = -1600, .want = "lie outside the file's 144 bytes"},
    {.cut = 100, .want = "but the file ends after 92"},
    {.cut = 8, .want = "but the file ends after 0"},
    {.cut = 7, .want = "7 bytes, expected at least 8"},
    {.cut = -1000000, .want = "model.safetensors: the file is empty"},
};

/* Opens `model`. If `want` is NULL it must open, otherwise the error's message must contain
 * `want`. */
static mf_model *mft_check_open(const char *model, const char *want, const char *what) {
    mf_model *m;
    toka_err e;
    int code = mf_open(&m, model, NULL, NULL, &e);
    bool ok = want ? code == TOKA_E_INPUT && strstr(e.msg, want) && !strchr(e.msg, '\n') : code == 0;
    CHECK_MSG(ok, "%s\n  gave: %s\n  want: %s", what, code ? e.msg : "no error", want ? want : "no error");
    CHECK(code == 0 || m == NULL);
    return m;
}

static void mft_write_tiny(const char *folder, const mft_spoil *s) {
    buf header = {0}, file = {0}, config = {0};
    size_t bytes = mft_tiny_header(0, COUNT(mft_tiny_tensors), &header) + (size_t)s->more;
    buf_c(&config, mft_tiny_config);
    if (s->from) mft_replace(&header, s->from, s->to);
    if (s->config_from) mft_replace(&config, s->config_from, s->config_to);
    mft_tiny_file(&file, &header, bytes, (size_t)s->odd);
    if (s->cut) file.n = s->cut > 0 ? (size_t)s->cut : (size_t)MAX((long)file.n + s->cut, 0L);
    mft_write_file(folder, "model.safetensors", buf_view(&file));
    mft_write_file(folder, "config.json", buf_view(&config));
    buf_free(&header), buf_free(&file), buf_free(&config);
}

static void test_mf_safetensors(void) {
    char folder[64];
    mft_temp_folder(folder);
    for (int i = 0; i < COUNT(mft_spoils); i++) {
        const mft_spoil *s = &mft_spoils[i];
        char what[512];
        snprintf(what, sizeof what, "case %d: %.400s", i, s->to ? s->to : s->config_to ? s->config_to : "length");
        mft_write_tiny(folder, s);
        mf_model *m = mft_check_open(folder, s->want, what);
        if (m && i == 0) {
            const char *file = m->maps[m->n_maps - 1].p;
            CHECK(m->n_parameters == MFT_PARAMETERS && m->weight_bytes == 2 * MFT_PARAMETERS);
            CHECK(mf_n_parameters(&m->config) == MFT_PARAMETERS);
            CHECK(m->weights.embed.rows == 10 && m->weights.embed.cols == 8 && m->weights.embed.dtype == TOKA_BF16);
            CHECK((const char *)m->weights.embed.data == file + m->maps[m->n_maps - 1].n - 2 * MFT_PARAMETERS);
            CHECK(m->weights.layers[1].mlp.down.rows == 8 && m->weights.layers[1].mlp.down.cols == 6);
            CHECK(m->weights.norm.rows == 1 && m->weights.norm.cols == 8 && m->weights.layers[0].q_bias.rows == 0);
            CHECK(strcmp(m->name, strrchr(folder, '/') + 1) == 0 && strcmp(m->config.arch->name, "LlamaForCausalLM") == 0);
        }
        if (m && s->config_to && strstr(s->config_to, "tie")) {
            CHECK(m->weights.lm_head.data == m->weights.embed.data);
            CHECK(m->n_parameters == MFT_PARAMETERS - 80);
        }
        mf_close(m);
    }
    mft_remove_folder(folder);
}

/* Impossible header lengths: only the eight bytes of the length are read. */
static void test_mf_header_length(void) {
    static const struct {
        const char *bytes, *want;
    } cases[] = {
        {"\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", "header of 18446744073709551615 bytes, expected at most 100000000"},
        {"\x01\xE1\xF5\x05\0\0\0\0", "header of 100000001 bytes, expected at most"},
        {"\0\xE1\xF5\x05\0\0\0\0", "header of 100000000 bytes, but the file ends after 8"},
        {"\x0C\0\0\0\0\0\0\0", "header of 12 bytes, but the file ends after 8"},
        {"\0\0\0\0\0\0\0\0", "the header does not begin with {"},
        {"\x02\0\0\0\0\0\0\0", "the tensors end at byte 0 of the data, which has 6"},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        arena a = {0};
        st_tensor *t;
        st_alias_list *names = NULL;
        int n;
        toka_err e;
        char *text = mem_alloc(16); /* on the heap, so that ASan reports a read past the end */
        memcpy(text, cases[i].bytes, 8), memcpy(text + 8, "{}      ", 8);
        int code = st_parse((str){text, 16}, "f", &a, &t, &n, &names, &e);
        CHECK_MSG(code == TOKA_E_INPUT && strstr(e.msg, cases[i].want), "case %d: %s", i, code ? e.msg : "no error");
        free(text);
        arena_free(&a);
    }
}

/* ---- Shards ---- */

static void mft_write_shard(const char *folder, const char *name, int from, int to) {
    buf header = {0}, file = {0};
    size_t bytes = mft_tiny_header(from, to, &header);
    mft_tiny_file(&file, &header, bytes, 0);
    mft_write_file(folder, name, buf_view(&file));
    buf_free(&header), buf_free(&file);
}

static void test_mf_shards(void) {
    char folder[64], path[128];
    const int n = COUNT(mft_tiny_tensors);
    const char index[] = "model.safetensors.index.json";
    mft_temp_folder(folder);
    mft_write_file(folder, "config.json", str_c(mft_tiny_config));
    mf_close(mft_check_open(folder, "there is no model.safetensors and no model.safetensors.index.json", "no weights"));
    mft_write_file(folder, "pytorch_model.bin", STR(""));
    mf_close(mft_check_open(folder, "pytorch_model.bin is not read", "only a pickle"));

    mft_write_shard(folder, "a.safetensors", 0, 9);
    mft_write_shard(folder, "b.safetensors", 9, n);
    static const char *const bad[][2] = {
        {"", "index.json: the file is empty"},
        {" ", "text ends too early"},
        {"{}", "there is no weight_map"},
        {"{\"weight_map\":{\"x\":\"../a.safetensors\"}}", "weight_map names \"../a.safetensors\", expected a plain name"},
        {"{\"weight_map\":{\"x\":\"/etc/a.safetensors\"}}", "expected a plain name"},
        {"{\"weight_map\":{\"x\":\"..\"}}", "expected a plain name"},
        {"{\"weight_map\":{\"x\":\"\"}}", "expected a plain name"},
        {"{\"weight_map\":{\"x\":7}}", "expected a plain name"},
        {"{\"weight_map\":{\"x\":\"a\\u0000.safetensors\"}}", "expected a plain name"},
        {"{\"weight_map\":{\"x\":\"a.safetensors\",\"y\":\"c.safetensors\"}}", "c.safetensors: No such file"},
        {"{\"weight_map\":{\"x\":\"a.safetensors\"}}", ".weight: missing in"},
    };
    for (int i = 0; i < COUNT(bad); i++) {
        mft_write_file(folder, index, str_c(bad[i][0]));
        mf_close(mft_check_open(folder, bad[i][1], bad[i][0]));
    }
    mft_write_file(folder, index, STR("{\"metadata\":{},\"weight_map\":{\"x\":\"a.safetensors\",\"y\":\"b.safetensors\","
                                  "\"z\":\"a.safetensors\"}}"));
    mf_model *m = mft_check_open(folder, NULL, "two shards");
    CHECK(m && m->n_parameters == MFT_PARAMETERS);
    mf_close(m);

    mft_write_shard(folder, "b.safetensors", 8, n);
    mf_close(mft_check_open(folder, "model.layers.0.self_attn.o_proj.weight is in two files", "one tensor in both"));
    mft_write_shard(folder, "b.safetensors", 9, n);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    CHECK(mkdir(path, 0700) == 0);
    mf_close(mft_check_open(folder, "model.safetensors: not a regular file",
                       "a folder in the file's place goes before the index"));
    mft_remove_folder(folder);
}

/* ---- Names that share one tensor ---- */

#define MFT_SHARED(dropped, kept) "{\"__metadata__\":{\"format\":\"pt\",\"" dropped "\":\"" kept "\"},"

typedef struct mft_share {
    const char *without;  /* the tensor of the tiny model that is not stored */
    const char *metadata; /* the beginning of the header, instead of { */
    const char *tied;     /* "true", "false" */
    const char *want;     /* words of an error; NULL: it opens */
} mft_share;

static const mft_share mft_shares[] = {
    {"model.embed_tokens.weight", "{", "true", NULL},
    {"model.embed_tokens.weight", MFT_SHARED("model.embed_tokens.weight", "lm_head.weight"), "true", NULL},
    {"model.embed_tokens.weight", MFT_SHARED("model.embed_tokens.weight", "lm_head.weight"), "false", NULL},
    {"model.embed_tokens.weight", "{", "false", "model.embed_tokens.weight: missing"},
    {"model.embed_tokens.weight", MFT_SHARED("model.embed_tokens.weight", "x"), "false", "model.embed_tokens.weight: missing"},
    {"lm_head.weight", "{", "true", NULL},
    {"lm_head.weight", "{", "false", "lm_head.weight: missing"},
    {"lm_head.weight", MFT_SHARED("lm_head.weight", "model.embed_tokens.weight"), "false", NULL},
    {"lm_head.weight", MFT_SHARED("lm_head.weight", "model.embed_tokens.weight"), "true", NULL},
    {"lm_head.weight", MFT_SHARED("lm_head.weight", "model.norm.weight"), "false", "lm_head.weight: [8], expected [10,8]"},
    {"model.layers.1.mlp.up_proj.weight",
     MFT_SHARED("model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"), "false", NULL},
    {"model.layers.1.mlp.up_proj.weight",
     MFT_SHARED("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"), "true",
     "model.layers.1.mlp.up_proj.weight: missing"},
};

/* Writes tensors from .. to-1 of the tiny model except one, with `begin` instead of the header's
 * {. */
static void mft_write_without(const char *folder, const char *name, const char *without, const char *begin,
                              int from, int to) {
    buf header = {0}, file = {0};
    size_t at = 0;
    buf_c(&header, begin);
    for (int i = from; i < to; i++) {
        const size_t rows = (size_t)MAX(mft_tiny_tensors[i].rows, 1), cols = (size_t)mft_tiny_tensors[i].cols;
        if (!strcmp(mft_tiny_tensors[i].name, without)) continue;
        buf_printf(&header, "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":[", at ? "," : "", mft_tiny_tensors[i].name);
        if (mft_tiny_tensors[i].rows) buf_printf(&header, "%zu,", rows);
        buf_printf(&header, "%zu],\"data_offsets\":[%zu,%zu]}", cols, at, at + 2 * rows * cols);
        at += 2 * rows * cols;
    }
    buf_char(&header, '}');
    mft_tiny_file(&file, &header, at, 0);
    mft_write_file(folder, name, buf_view(&file));
    buf_free(&header), buf_free(&file);
}

static void mft_write_config(const char *folder, const char *tied) {
    buf config = {0};
    buf_c(&config, mft_tiny_config);
    mft_replace(&config, "{", "{\"tie_word_embeddings\":@,");
    mft_replace(&config, "@", tied);
    mft_write_file(folder, "config.json", buf_view(&config));
    buf_free(&config);
}

static void mft_check_shared(const mf_model *m, const mft_share *s) {
    const int left_out = strstr(s->without, "up_proj") ? 48 : 80;
    CHECK_MSG(m->n_parameters == MFT_PARAMETERS - left_out && m->weight_bytes == 2 * (size_t)m->n_parameters,
              "%s: %lld parameters, %zu bytes", s->without, (long long)m->n_parameters, m->weight_bytes);
    if (left_out == 80) CHECK(m->weights.lm_head.data == m->weights.embed.data);
    else CHECK(m->weights.layers[0].mlp.up.data == m->weights.layers[1].mlp.up.data);
}

static void test_mf_shared(void) {
    const char index[] = "model.safetensors.index.json";
    const int n = COUNT(mft_tiny_tensors);
    char folder[64], what[300];
    for (int i = 0; i < COUNT(mft_shares); i++)
        for (int shards = 0; shards < 2; shards++) {
            const mft_share *s = &mft_shares[i];
            mft_temp_folder(folder);
            mft_write_config(folder, s->tied);
            snprintf(what, sizeof what, "without %s, %s tied %s, %d", s->without, s->metadata, s->tied, shards);
            if (shards) { /* the names are in a shard that has neither tensor */
                mft_write_without(folder, "a.safetensors", s->without, "{", 0, n - 1);
                mft_write_without(folder, "b.safetensors", "", s->metadata, n - 1, n);
                mft_write_file(folder, index, STR("{\"weight_map\":{\"x\":\"a.safetensors\",\"y\":\"b.safetensors\"}}"));
            } else {
                mft_write_without(folder, "model.safetensors", s->without, s->metadata, 0, n);
            }
            mf_model *m = mft_check_open(folder, s->want, what);
            if (m) mft_check_shared(m, s);
            mf_close(m);
            mft_remove_folder(folder);
        }
    mft_temp_folder(folder); /* the names are in the index */
    mft_write_config(folder, "false");
    mft_write_without(folder, "a.safetensors", "lm_head.weight", "{", 0, n);
    mft_write_file(folder, index, STR("{\"metadata\":{\"total_size\":1,\"lm_head.weight\":\"model.embed_tokens.weight\"},"
                                      "\"weight_map\":{\"x\":\"a.safetensors\"}}"));
    mf_model *m = mft_check_open(folder, NULL, "names in the index");
    if (m) mft_check_shared(m, &mft_shares[5]);
    mf_close(m);
    mft_remove_folder(folder);
}

/* ---- Files that change while they are mapped ---- */

/* Writes a new file and renames it over the old one. */
static void mft_replace_file(const char *folder, const char *name, str text) {
    char from[128], to[128];
    mft_write_file(folder, "new", text);
    snprintf(from, sizeof from, "%s/new", folder), snprintf(to, sizeof to, "%s/%s", folder, name);
    CHECK(rename(from, to) == 0);
}

static void test_mf_overwritten(void) {
    static const char *const names[] = {"a.safetensors", "b.safetensors"};
    char folder[64], path[128];
    const int n = COUNT(mft_tiny_tensors);
    mft_temp_folder(folder);
    mft_write_file(folder, "config.json", str_c(mft_tiny_config));
    mft_write_file(folder, "model.safetensors.index.json", STR("{\"weight_map\":{\"x\":\"a.safetensors\",\"y\":\"b.safetensors\"}}"));
    for (int way = 0; way < 6; way++)
        for (int i = 0; i < 2; i++) {
            const struct timespec times[2] = {{.tv_sec = 1000}, {.tv_sec = 1000 + way, .tv_nsec = 5}};
            struct stat st;
            mft_write_shard(folder, names[0], 0, 9), mft_write_shard(folder, names[1], 9, n);
            mf_model *m = mft_check_open(folder, NULL, "two shards");
            CHECK(m && m->n_weight_files == 2 && !mf_find_overwritten(m));
            snprintf(path, sizeof path, "%s/%s", folder, names[i]);
            CHECK(stat(path, &st) == 0);
            if (way == 0) mft_write_file(folder, names[i], STR("short"));
            /* looks like a file that was written to */
            if (way == 1) CHECK(utimensat(AT_FDCWD, path, times, 0) == 0);
            if (way == 2) mft_replace_file(folder, names[i], STR("another"));
            if (way == 3) CHECK(unlink(path) == 0);
            if (way == 4) CHECK(chmod(path, 0600) == 0 && link(path, "/tmp/toka_mf_link") == 0 && unlink("/tmp/toka_mf_link") == 0);
            /* read once, not mapped for long */
            if (way == 5) mft_write_file(folder, "config.json", str_c(mft_tiny_config));
            const char *found = m ? mf_find_overwritten(m) : NULL;
            CHECK_MSG(way < 2 ? found && !strcmp(found, path) : !found, "way %d: %s", way, found ? found : "none");
            mf_close(m);
        }
    mft_remove_folder(folder);
}

/* ---- Files that are not regular files: each file in each way ---- */

static void test_mf_odd_files(void) {
    static const char *const names[] = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                                        "chat_template.jinja", "model.safetensors"};
    static const char *const want[] = {"not a regular file", "not a regular file", "Too many levels of symbolic links",
                                       "No such file or directory", "Permission denied", "the file is empty"};
    char folder[64], path[128];
    mft_temp_folder(folder);
    mft_write_tiny(folder, &(mft_spoil){0});
    for (int i = 0; i < COUNT(names); i++)
        for (int how = 0; how < 6; how++) {
            if (how == 4 && geteuid() == 0) {
                SKIP(1, "root reads every file");
                continue;
            }
            snprintf(path, sizeof path, "%s/%s", folder, names[i]);
            unlink(path);
            int code = how == 0 ? mkdir(path, 0700) : how == 1 ? mkfifo(path, 0600) : how == 2 ? symlink(names[i], path)
                     : how == 3 ? symlink("nowhere", path)
                     : (mft_write_file(folder, names[i], how == 4 ? STR("{}") : STR("")), chmod(path, how == 4 ? 0 : 0600));
            CHECK(code == 0);
            char what[128];
            snprintf(what, sizeof what, "%s, way %d", names[i], how);
            mf_close(mft_check_open(folder, want[how], what));
            if (how == 0) rmdir(path);
            else unlink(path);
            if (i == 0 || i == 5) mft_write_tiny(folder, &(mft_spoil){0});
        }
    mf_close(mft_check_open(folder, NULL, "and whole again"));
    mft_write_file(folder, "tokenizer_config.json", STR("{\"chat_template\":\"from the config\",\"eos_token\":\"</s>\"}"));
    mf_model *m = mft_check_open(folder, NULL, "a template in tokenizer_config.json");
    CHECK(m && !m->defaults.has_temperature && m->defaults.temperature == 1 && m->defaults.top_p == 1);
    CHECK(m && str_is(mf_template_named(m, "default"), "from the config") && strcmp(m->eos_token, "</s>") == 0 &&
          m->tokenizer_json.n == 0);
    mf_close(m);
    mft_write_file(folder, "chat_template.jinja", STR("from the file"));
    m = mft_check_open(folder, NULL, "chat_template.jinja goes first");
    CHECK(m && str_is(mf_template_named(m, "default"), "from the file"));
    mf_close(m);
    mft_write_file(folder, "tokenizer_config.json", STR("{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"old\"}]}"));
    m = mft_check_open(folder, NULL, "files go before the whole list");
    CHECK(m && str_is(mf_template_named(m, "default"), "from the file") && !mf_template_named(m, "tool_use").n);
    mf_close(m);
    snprintf(path, sizeof path, "%s/additional_chat_templates", folder);
    CHECK(mkdir(path, 0700) == 0);
    mft_write_file(folder, "additional_chat_templates/tool_use.jinja", STR("with tools"));
    m = mft_check_open(folder, NULL, "a template for tools in a file of its own");
    CHECK(m && str_is(mf_template_named(m, "default"), "from the file") && str_is(mf_template_named(m, "tool_use"), "with tools"));
    mf_close(m);
    mft_remove_folder(folder);
}

/* Checks the templates of a folder by name, as "name=source ...". files: names and contents in
 * turn. */
static void mft_template_set(const char *const files[8], const char *want) {
    char folder[64], path[128];
    buf got = {0};
    mft_temp_folder(folder);
    mft_write_tiny(folder, &(mft_spoil){0});
    snprintf(path, sizeof path, "%s/additional_chat_templates", folder);
    CHECK(mkdir(path, 0700) == 0);
    for (int i = 0; i < 8 && files[i]; i += 2) mft_write_file(folder, files[i], str_c(files[i + 1]));
    static const char *const names[] = {"default", "tool_use", "rag", "a.b"};
    mf_model *m = mft_check_open(folder, want[0] == '!' ? want + 1 : NULL, files[1]);
    for (int i = 0; m && i < COUNT(names); i++) {
        const str source = mf_template_named(m, names[i]);
        if (source.n) buf_printf(&got, "%s=%.*s ", names[i], STRF(source));
    }
    if (m) CHECK_MSG(str_is(buf_view(&got), want), "%s: %s, not %s", files[1], got.p, want);
    mf_close(m), buf_free(&got);
    mft_remove_folder(folder);
}

static void mft_templates(void) {
#define MFT_TC "tokenizer_config.json"
#define MFT_MORE "additional_chat_templates/"
    static const char list[] = "{\"chat_template\":[{\"name\":\"default\",\"template\":\"A\"},{\"name\":\"tool_use\",\"template\":\"B\"},"
                               "{\"name\":\"rag\",\"template\":\"C\"},{\"name\":\"default\",\"template\":\"D\"}]}";
    static const struct { const char *files[8], *want; } cases[] = {
        {{MFT_TC, list}, "default=D tool_use=B rag=C "},
        {{MFT_TC, "{\"chat_template\":{\"default\":\"A\",\"rag\":\"C\"}}"}, "default=A rag=C "},
        {{MFT_TC, list, "chat_template.jinja", "E"}, "default=E "},
        {{MFT_TC, list, MFT_MORE "rag.jinja", "F", MFT_MORE "notes.txt", "x"}, "rag=F "},
        {{MFT_TC, list, MFT_MORE "default.jinja", "G", "chat_template.jinja", "E"}, "default=G "},
        {{MFT_TC, list, MFT_MORE "a.b.jinja", "H", "chat_template.jinja", "E", MFT_MORE "tool_use.jinja", "I"}, "default=E tool_use=I a.b=H "},
        {{MFT_TC, list, "chat_template.json", "{\"chat_template\":\"J\"}"}, "default=D tool_use=B rag=C "},
        {{MFT_TC, "{}", "chat_template.json", "{\"chat_template\":\"J\",\"x\":NaN}"}, "default=J "},
        {{MFT_TC, "{}", "chat_template.json", "{\"chat_template\":\"J\"}", "chat_template.jinja", "E"}, "default=E "},
        {{MFT_TC, "{}", "chat_template.json", "[]"}, "!chat_template.json: not a JSON object"},
        {{MFT_TC, "{\"chat_template\":[{\"name\":\"default\"}]}"}, "!chat_template is missing, expected a string or a list of named ones"},
        {{MFT_TC, "{\"chat_template\":[\"x\"]}"}, "!chat_template is missing, expected a string"},
        {{MFT_TC, "{\"chat_template\":{\"default\":7}}"}, "!chat_template is 7, expected a string"},
        {{MFT_TC, "{}", MFT_MORE "rag.jinja", ""}, "!additional_chat_templates/rag.jinja: the file is empty"}};
    for (int i = 0; i < COUNT(cases); i++) mft_template_set(cases[i].files, cases[i].want);
}

/* ---- Finding ---- */

/* The error's message when `model` is opened with this models.txt; "" if it opens and its name is
 * `name`. */
static const char *mft_find_error(const char *model, const char *models_file, const char *name) {
    static toka_err e;
    mf_model *m;
    e.msg[0] = 0;
    if (mf_open(&m, model, models_file, NULL, &e)) return e.msg;
    CHECK_MSG(strcmp(m->name, name) == 0, "%s", m->name);
    mf_close(m);
    return "";
}

static void test_mf_find(void) {
    static const char *const env[] = {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"};
    static const char *const below[] = {"", "", "hub/", "huggingface/hub/", ".cache/huggingface/hub/"};
    char *old[COUNT(env)], root[64], path[256], models[128];
    for (int i = 0; i < COUNT(env); i++) old[i] = getenv(env[i]) ? strdup(getenv(env[i])) : NULL, unsetenv(env[i]);
    mft_temp_folder(root);
    /* each takes precedence over those set in earlier rounds */
    for (int i = COUNT(env) - 1; i >= 0; i--) {
        snprintf(path, sizeof path,
                 "mkdir -p %s/%d/%smodels--org--tiny-%d/refs %s/%d/%smodels--org--tiny-%d/snapshots/abc123", root,
                 i, below[i], i, root, i, below[i], i);
        CHECK(system(path) == 0);
        snprintf(path, sizeof path, "%s/%d", root, i);
        setenv(env[i], path, 1);
        snprintf(path, sizeof path, "%s/%d/%smodels--org--tiny-%d/snapshots/abc123", root, i, below[i], i);
        mft_write_tiny(path, &(mft_spoil){0});
        strcpy(strstr(path, "snapshots"), "refs");
        mft_write_file(path, "main", STR("abc123\n"));
        char id[32];
        snprintf(id, sizeof id, "org/tiny-%d", i);
        CHECK_MSG(!*mft_find_error(id, NULL, id), "%s: %s", env[i], mft_find_error(id, NULL, id));
        strcat(id, "@abc123");
        CHECK(!*mft_find_error(id, NULL, id));
    }
    /* an environment file where no shell expanded it */
    setenv("HOME", root, 1), setenv("HF_HUB_CACHE", "~/0", 1);
    CHECK_MSG(!*mft_find_error("org/tiny-0", NULL, "org/tiny-0"), "%s", mft_find_error("org/tiny-0", NULL, "org/tiny-0"));
    CHECK(strstr(mft_find_error("org/tiny-0@abc124", NULL, ""), "get it with: hf download org/tiny-0 --revision abc124"));
    CHECK(strstr(mft_find_error("org/none", NULL, ""), "/0; get it with: hf download org/none"));
    CHECK(strstr(mft_find_error("org/../x", NULL, ""), "not a hub id"));
    CHECK(strstr(mft_find_error("org/tiny@../../x", NULL, ""), "not a hub id"));
    CHECK(strstr(mft_find_error("no-such-folder/a/b", NULL, ""), "no such folder"));
    CHECK(strstr(mft_find_error("", NULL, ""), "no such folder"));
    CHECK(strstr(mft_find_error("/dev/null", NULL, ""), "not a folder"));

    const char config[] = "{\"model_type\": \"llama\"}";
    buf text = {0};
    buf_printf(&text, "# comment\n\ntiny org/tiny-0 - %s\n  other org/gone\t-  %s \r\n", config, config);
    mft_write_file(root, "models.txt", buf_view(&text));
    snprintf(models, sizeof models, "%s/models.txt", root);
    CHECK_MSG(!*mft_find_error("tiny", models, "tiny"), "%s", mft_find_error("tiny", models, "tiny"));
    CHECK(!*mft_find_error("TINY", models, "tiny"));
    const char *msg = mft_find_error("other", models, "");
    CHECK_MSG(strstr(msg, "other: org/gone is not in the hub cache") && strstr(msg, "hf download org/gone"), "%s", msg);
    CHECK(strstr(mft_find_error("third", models, ""), "third: no such folder, and no such name in models.txt"));
    CHECK(strstr(mft_find_error("third", "/nowhere/models.txt", ""), "/nowhere/models.txt: No such file"));

    snprintf(path, sizeof path, "%s/0/models--org--tiny-0/refs/main", root);
    unlink(path);
    CHECK(strstr(mft_find_error("org/tiny-0", NULL, ""), "is not in the hub cache"));
    snprintf(path, sizeof path, "%s/loop", root);
    CHECK(symlink("loop", path) == 0 && strstr(mft_find_error(path, NULL, ""), "Too many levels of symbolic links"));
    mft_remove_folder(root);
    buf_free(&text);
    for (int i = 0; i < COUNT(env); i++) {
        if (old[i]) setenv(env[i], old[i], 1);
        else unsetenv(env[i]);
        free(old[i]);
    }
}

/* ---- models.txt ---- */

static void test_mf_models_refused(void) {
#define CONFIG(fields) "{\"architectures\": [\"LlamaForCausalLM\"], \"num_hidden_layers\": 2, \"hidden_size\": 8, " \
                       "\"num_attention_heads\": 2, \"vocab_size\": 10" fields "}\n"
    static const char *const bad[][2] = {
        {"a\n", "models.txt line 1: expected a name, a hub id, a template family and a config"},
        {"\n# x\nt o/t {}\n", "models.txt line 3: expected a name"},
        {"t o/t - \n", "models.txt line 1: "},
        {"t o/t - 2 8 2 1 4 6 10", "models.txt line 1: "},
        {"t o/t - []", "not a JSON object"},
        {"a/t o/t - " CONFIG(""), "models.txt line 1: name a/t, expected one without '/'"},
        {"t o/t - {\"architectures\": [\"GemmaForCausalLM\"]}", "expected LlamaForCausalLM"},
        {"t o/t - " CONFIG(", \"num_key_value_heads\": 3"), "expected a multiple of"},
        {"t o/t - " CONFIG("") "T\to/t - " CONFIG(""), "line 2: t is there twice"},
    };
#undef CONFIG
    for (int i = 0; i < COUNT(bad); i++) {
        arena a = {0};
        mf_known_model *list;
        int n;
        toka_err e;
        int code = mf_models_parse(str_c(bad[i][0]), &a, &list, &n, &e);
        CHECK_MSG(code == TOKA_E_INPUT && strstr(e.msg, bad[i][1]), "%s\n  gave: %s", bad[i][0], code ? e.msg : "no error");
        arena_free(&a);
    }
}

/* The parameter counts that the hub shows for these models, without what toka leaves out: the layers
 * that predict more than one token, and of Gemma 3 the 416,866,032 parameters that see images and
 * 1152 (E + 1) that project them. Any wrong number in a shape changes the count. */
static const struct {
    const char *name;
    int64_t n_parameters;
} mft_known_counts[] = {
    {"llama-3.2-1b", 1235814400},   {"llama-3.2-3b-instruct", 3212749824}, {"llama-3.1-8b", 8030261248},
    {"llama-3.1-70b", 70553706496}, {"llama-3.3-70b-instruct", 70553706496}, {"llama-2-7b", 6738415616},
    {"llama-2-13b", 13015864320},   {"mistral-7b-v0.1", 7241732096},       {"mistral-7b-v0.3", 7248023552},
    {"mistral-nemo-base", 12247782400}, {"qwen2.5-0.5b", 494032768},       {"qwen2.5-1.5b", 1543714304},
    {"qwen2.5-3b", 3085938688},     {"qwen2.5-7b", 7615616512},            {"qwen2.5-14b", 14770033664},
    {"qwen2.5-32b", 32763876352},   {"qwen2.5-72b", 72706203648},          {"qwen3-4b", 4022468096},
    {"qwen3-8b", 8190735360},       {"qwen3-14b", 14768307200},            {"qwen3-32b", 32762123264},
    {"r1-distill-qwen-1.5b", 1777088000}, {"smollm2-135m", 134515008},     {"smollm2-360m", 361821120},
    {"smollm2-1.7b", 1711376384},   {"tinyllama-1.1b-chat", 1100048384},
    {"llama-2-70b", 68976648192},   {"llama-3-8b", 8030261248},            {"llama-3-70b", 70553706496},
    {"llama-3.1-405b", 405853388800}, {"mixtral-8x7b", 46702792704},       {"qwen2-0.5b", 494032768},
    {"qwen2-1.5b", 1543714304},     {"qwen2-7b", 7615616512},              {"qwen2-72b", 72706203648},
    {"qwen1.5-moe-a2.7b", 14315784192}, {"qwen3-30b-a3b", 30532122624},    {"qwen3-235b-a22b", 235093634560},
    {"gpt-oss-20b", 20914757184},   {"gpt-oss-120b", 116829156672},        {"deepseek-v2-lite", 15706484224},
    {"deepseek-v2", 235741434880},  {"deepseek-v3", 671026419200},         {"glm-4-9b-0414", 9400279040},
    {"gemma-2-2b", 2614341888},     {"gemma-2-9b", 9241705984},            {"gemma-2-27b", 27227128320},
    {"gemma-3-1b", 999885952},      {"gemma-3-4b", 3880263168},            {"gemma-3-12b", 11766034176},
    {"gemma-3-27b", 27009346304},   {"phi-3-mini-4k-instruct", 3821079552}, {"phi-3-medium-4k-instruct", 13960238080},
    {"phi-4", 14659507200},         {"phi-4-mini-instruct", 3836021760},   {"olmo-2-1b", 1484916736},
    {"olmo-2-7b", 7298617344},      {"olmo-2-13b", 13716198400},           {"olmo-2-32b", 32234279936},
    {"olmo-3-7b", 7298011136},      {"olmo-3-32b", 32233522176},           {"olmoe-1b-7b", 6919161856},
    {"smollm3-3b", 3075098624},     {"granite-3.1-2b-instruct", 2533531648}, {"granite-3.1-8b-instruct", 8170848256},
    {"command-r7b-12-2024", 8028033024},
};

static void test_mf_models_txt(void) {
    arena a = {0};
    mf_known_model *list;
    int n;
    toka_err e;
    int code = mf_read_models_file("models.txt", &a, &list, &n, &e);
    CHECK_MSG(code == 0, "%s", e.msg);
    CHECK(code || n >= 140);
    for (int i = 0; !code && i < COUNT(mft_known_counts); i++) {
        int at = 0;
        while (at < n && strcmp(list[at].name, mft_known_counts[i].name) != 0) at++;
        int64_t count = at < n ? mf_n_parameters(&list[at].config) : -1;
        CHECK_MSG(count == mft_known_counts[i].n_parameters, "%s: %lld", mft_known_counts[i].name, (long long)count);
    }
    for (int i = 0; !code && i < n; i++) {
        const mf_config *c = &list[i].config;
        CHECK_MSG((c->features & c->arch->features) == c->arch->features, "%s: extras", list[i].name);
        CHECK(mf_is_hub_id(str_c(list[i].hub_id)) && c->rope_table.freq[0] > 0.1f);
    }
    arena_free(&a);
}

/* ---- Real and made models ---- */

static void test_mf_data(void) {
    static const struct {
        const char *folder;
        int L, E, H, K, D, F, V, max_len;
        int64_t n;
    } models[] = {
        {"weights/stories260K", 5, 64, 8, 4, 8, 172, 512, 512, 260032},
        {"weights/babyllama-tok105", 5, 128, 8, 4, 16, 352, 105, 256, 936448},
    };
    for (int i = 0; i < COUNT(models); i++) {
        const char *path = data_path(models[i].folder);
        if (!path) {
            SKIP(1, "no public test data");
            continue;
        }
        mf_model *m = mft_check_open(path, NULL, path);
        if (!m) continue;
        CHECK(mft_shape_is(&m->config, models[i].L, models[i].E, models[i].H, models[i].K, models[i].D, models[i].F,
                       models[i].V,
                       models[i].max_len));
        CHECK(m->n_parameters == models[i].n && m->weight_bytes == 4 * (size_t)models[i].n);
        CHECK(m->weights.lm_head.data == m->weights.embed.data && m->weights.embed.dtype == TOKA_F32);
        CHECK(m->config.bos_id == 1 && m->config.n_eos_ids == 1 && m->config.eos_ids[0] == 2 && m->tokenizer_json.n > 1000);
        mf_close(m);
    }
}

static void test_mf_fixtures(void) {
    DIR *d = opendir("test/fixtures");
    int n = 0;
    for (struct dirent *it; d && (it = readdir(d)) != NULL;) {
        char path[400];
        snprintf(path, sizeof path, "test/fixtures/%s", it->d_name);
        if (it->d_name[0] == '.' || !os_is_dir(path)) continue;
        mf_model *m = mft_check_open(path, NULL, path);
        CHECK(m && m->n_parameters == mf_n_parameters(&m->config) && strcmp(m->name, it->d_name) == 0);
        mf_close(m);
        n++;
    }
    if (d) closedir(d);
    if (!n) SKIP(1, "no test/fixtures");
}

static void test_mf_embedded(void) {
    char folder[64], path[128];
    toka_err e;
    mf_model *m;
    mft_temp_folder(folder);
    mft_write_tiny(folder, &(mft_spoil){0});
    mf_embedded files[3] = {{.name = "config.json"}, {.name = "model.safetensors"}, {0}};
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, files[i].name);
        str s = read_copy(path);
        files[i].begin = s.p, files[i].end = s.p + s.n;
    }
    CHECK(mf_open(&m, NULL, NULL, files, &e) == 0);
    if (m) CHECK(m->n_parameters == MFT_PARAMETERS && !m->folder && strcmp(m->name, "embedded") == 0 && m->n_maps == 0);
    mf_close(m);
    CHECK(mf_open(&m, NULL, NULL, NULL, &e) == TOKA_E_USE && strstr(e.msg, "no model given"));
    CHECK(mf_open(&m, NULL, NULL, (mf_embedded[]){{0}}, &e) == TOKA_E_USE);
    CHECK(mf_open(&m, NULL, NULL, files + 1, &e) && strstr(e.msg, "embedded config.json: no such file"));
    for (int i = 0; i < 2; i++) free((void *)files[i].begin);
    mft_remove_folder(folder);
}

/* A sparse file with an embedding of 2 GB: opening it must not read it. */
static void test_mf_lazy(void) {
    char folder[64], path[128];
    mft_temp_folder(folder);
    buf header = {0}, file = {0}, config = {0};
    size_t big = (size_t)67108864 * 8 * 4;
    buf_c(&config, mft_tiny_config);
    mft_replace(&config, "\"vocab_size\":10", "\"vocab_size\":67108864,\"tie_word_embeddings\":true");
    size_t bytes = mft_tiny_header(3, COUNT(mft_tiny_tensors), &header);
    char extra[300];
    snprintf(extra, sizeof extra, "{\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[8],\"data_offsets\":[%zu,%zu]},"
             "\"model.embed_tokens.weight\":{\"dtype\":\"F32\",\"shape\":[67108864,8],\"data_offsets\":[%zu,%zu]},", bytes,
             bytes + 16, bytes + 16, bytes + 16 + big);
    mft_replace(&header, "{", extra);
    mft_tiny_file(&file, &header, 0, 0);
    mft_write_file(folder, "config.json", buf_view(&config));
    mft_write_file(folder, "model.safetensors", buf_view(&file));
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    CHECK(truncate(path, (off_t)(file.n + bytes + 16 + big)) == 0);
    double t0 = os_now();
    mf_model *m = mft_check_open(folder, NULL, "2 GB of zeros that are not there");
    CHECK(m && m->weight_bytes > big && os_now() - t0 < 1);
    unsigned char *in = mem_zalloc(big / 4096 + 2); /* which pages of the mapping are in memory */
    if (m) {
        str map = m->maps[m->n_maps - 1];
        size_t resident = 0, pages = (map.n + 4095) / 4096;
        CHECK(mincore((void *)map.p, map.n, in) == 0);
        for (size_t i = 0; i < pages; i++) resident += in[i] & 1;
        CHECK_MSG(resident < 2000, "%zu pages", resident); /* only read-ahead around the header */
    }
    free(in);
    mf_close(m);
    mft_remove_folder(folder);
    buf_free(&header), buf_free(&file), buf_free(&config);
}

static const struct test mf_tests[] = {
    {"mf_rope", test_mf_rope},
    {"mf_config_refused", test_mf_config_refused},
    {"mf_config_defaults", test_mf_config_defaults},
    {"mf_config_fields", test_mf_config_fields},
    {"mf_config_rows", test_mf_config_rows},
    {"mf_patterns", test_mf_patterns},
    {"mf_formats", test_mf_formats},
    {"mf_slices", test_mf_slices},
    {"mf_shares", test_mf_shares},
    {"mf_to_fp8", test_mf_to_fp8},
    {"mf_quantize", test_mf_quantize},
    {"mf_infinity", test_mf_infinity},
    {"mf_generation", test_mf_generation},
    {"mf_generation_requests", test_mf_generation_requests},
    {"mf_generation_unused", test_mf_generation_unused},
    {"mf_tokenizer_config", test_mf_tokenizer_config},
    {"mf: special tokens of files and classes", mft_specials},
    {"mf: added tokens of tokenizer_config.json", mft_added_tokens},
    {"mf: special tokens by name, and flags", mft_named_tokens},
    {"mf: chat templates by name", mft_templates},
    {"mf_around_texts", mft_around_texts},
    {"mf_folder_names", mft_folder_names},
    {"mf_safetensors", test_mf_safetensors},
    {"mf_header_length", test_mf_header_length},
    {"mf_shards", test_mf_shards},
    {"mf_shared", test_mf_shared},
    {"mf_overwritten", test_mf_overwritten},
    {"mf_odd_files", test_mf_odd_files},
    {"mf_find", test_mf_find},
    {"mf_models_refused", test_mf_models_refused},
    {"mf_models_txt", test_mf_models_txt},
    {"mf_data", test_mf_data},
    {"mf_fixtures", test_mf_fixtures},
    {"mf_embedded", test_mf_embedded},
    {"mf_lazy", test_mf_lazy},
    {0},
};
