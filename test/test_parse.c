/* Tests of chapter 35: samples of every form of tool calls and of reasoning, each fed whole, byte by
 * byte and cut in two at every byte. The events are shown as one text: content as it is, reasoning
 * as <r:..>, a call as <NAME#ID:ARGUMENTS>. */

static const char parse_test_tools[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\",\"properties\":{"
    "\"s\":{\"type\":\"string\"},\"i\":{\"type\":\"integer\"},\"b\":{\"type\":\"boolean\"},\"o\":{\"type\":\"object\"},"
    "\"l\":{\"type\":\"array\"},\"n\":{\"type\":[\"string\",\"null\"]},\"u\":{},\"e\":{\"enum\":[\"1\",\"2\"]},"
    "\"a\":{\"anyOf\":[{\"type\":\"number\"},{\"type\":\"null\"}]}}}}},"
    "{\"function\":{\"name\":\"r\",\"parameters\":{\"properties\":{\"o\":{\"anyOf\":[{\"$ref\":\"#/$defs/O\"},{\"type\":\"null\"}]},"
    "\"c\":{\"const\":\"5\"},\"d\":{\"const\":5},\"e\":{\"$ref\":\"#/$defs/E\"},\"a\":{\"allOf\":[{\"$ref\":\"#S\"}],\"type\":[\"string\",\"integer\"]},"
    "\"u\":{\"anyOf\":[{\"type\":\"string\"},{}]},\"m\":{\"type\":[\"string\",\"integer\"],\"enum\":[\"1\"]},\"x\":{\"$ref\":\"#/no\"},\"y\":{\"$ref\":\"#/$defs/Y\"}},"
    "\"$defs\":{\"O\":{\"type\":\"object\"},\"E\":{\"enum\":[\"1\",\"2\"]},\"S\":{\"$anchor\":\"S\",\"type\":\"string\"},\"Y\":{\"$ref\":\"#/$defs/Y\"}}}}},"
    "{\"function\":{\"name\":\"q\",\"parameters\":{\"$ref\":\"#/$defs/Q\",\"$defs\":{\"Q\":{\"properties\":{\"s\":{\"type\":\"string\"}}}}}}},"
    "{\"function\":{\"name\":\"k\",\"parameters\":{\"properties\":{\"\":{\"type\":\"integer\"},\" k \":{\"type\":\"integer\"},\"p\":{\"type\":\"string\"},\"a\\\"b>c\":{\"type\":\"integer\"},"
    "\"a\":{\"type\":\"integer\"}},\"patternProperties\":{\"^n_\":{\"type\":\"integer\"},\"_s$\":{\"type\":\"string\"},\"s_s\":{\"type\":[\"string\",\"integer\"]},\"(\":{\"type\":\"null\"}},\"additionalProperties\":{\"type\":\"boolean\"}}}},"
    "{\"function\":{\"name\":\"any\",\"parameters\":{\"additionalProperties\":true}}},"
    "{\"function\":{\"name\":\"two\",\"parameters\":{\"properties\":{\"a\":{\"type\":\"string\"}},\"additionalProperties\":{\"type\":\"integer\"},\"allOf\":[{\"properties\":{\"b\":{\"type\":\"string\"}}}]}}},"
    "{\"function\":{\"name\":\"all\",\"parameters\":{\"allOf\":[{\"properties\":{\"a\":{\"type\":[\"string\",\"integer\"]},\"b\":{\"type\":[\"string\",\"null\"]}}},"
    "{\"$ref\":\"#/$defs/A\"}],\"anyOf\":[{\"properties\":{\"b\":{\"type\":\"null\"}}},{\"properties\":{\"c\":{\"type\":\"string\"}}},{\"properties\":{\"c\":{}}}],"
    "\"$defs\":{\"A\":{\"properties\":{\"a\":{\"type\":\"string\"},\"b\":{}}}}}}},"
    "{\"type\":\"function\",\"function\":{\"name\":\"g\"}},7,{\"function\":{\"name\":\"h\",\"parameters\":3}}]";

typedef struct parse_sample {
    const char *format, *family; /* names; NULL: none */
    bool thinking, one_call;
    const char *text, *want;
} parse_sample;

static bool parse_valid_calls; /* of the next setup */

static void parse_show(const parser *p, buf *out) {
    parse_event event;
    bool in_call = false;
    buf_clear(out);
    for (str events = buf_view(&p->events); parse_next_event(&events, &event);) {
        if (in_call && event.kind != PARSE_ARGUMENTS) buf_c(out, ">"), in_call = false;
        if (event.kind == PARSE_REASONING) buf_c(out, "<r:");
        if (event.kind == PARSE_CALL) buf_c(out, "<"), in_call = true;
        buf_str(out, event.text);
        if (event.kind == PARSE_REASONING) buf_c(out, ">");
        if (event.kind == PARSE_CALL) buf_c(out, "#"), buf_str(out, event.id), buf_c(out, ":");
    }
    if (in_call) buf_c(out, ">");
    if (!out->n) buf_c(out, "");
}

/* Feeds the text in pieces: the first of n_first bytes, further ones of n_next bytes. */
static void parse_in_pieces(const parse_setup *setup, str text, size_t n_first, size_t n_next, buf *out) {
    parser p;
    parser_init(&p, setup);
    for (size_t at = 0, n = n_first; at < text.n; at += n, n = n_next) {
        n = MIN(n, text.n - at);
        parser_feed(&p, str_sub(text, at, at + n));
    }
    parser_end(&p);
    parse_show(&p, out);
    parser_free(&p);
}

static parse_setup parse_test_setup(const parse_sample *sample, arena *memory) {
    toka_err e;
    const json *tools = json_parse(memory, str_c(parse_test_tools), json_trusted, &e);
    parse_tool *list;
    parse_setup setup = {.one_call = sample->one_call, .valid_calls = parse_valid_calls, .thinking = sample->thinking};
    if (sample->format) setup.format = parse_find_format(sample->format, STR(""));
    if (sample->family) setup.family = parse_find_family(sample->family, STR(""));
    CHECK_MSG(!sample->format == !setup.format && !sample->family == !setup.family, "%s %s", sample->format, sample->family);
    setup.n_tools = parse_tools_init(memory, tools, &list);
    setup.tools = list;
    return setup;
}

static void parse_check(const parse_sample *sample) {
    arena memory = {0};
    const parse_setup setup = parse_test_setup(sample, &memory);
    const str text = str_c(sample->text);
    buf whole = {0}, cut = {0};
    parse_in_pieces(&setup, text, text.n, 1, &whole);
    CHECK_MSG(str_is(buf_view(&whole), sample->want), "%s %s\n  text %s\n  got  %s\n  want %s", sample->format ? sample->format : "",
              sample->family ? sample->family : "", sample->text, whole.p, sample->want);
    for (size_t n = 1; n <= text.n; n++) {
        parse_in_pieces(&setup, text, n, n == 1 ? 1 : text.n, &cut);
        CHECK_MSG(str_eq(buf_view(&whole), buf_view(&cut)), "%s: cut at %zu\n  got  %s\n  want %s", sample->text, n, cut.p, whole.p);
    }
    buf_free(&whole), buf_free(&cut);
    arena_free(&memory);
}

#define DS_CALLS "<｜tool▁calls▁begin｜>"
#define DS_CALL "<｜tool▁call▁begin｜>"
#define DS_SEP "<｜tool▁sep｜>"
#define DS_END "<｜tool▁call▁end｜>"
#define DS_CALLS_END "<｜tool▁calls▁end｜>"

/* Each form as the model's template writes it, and what models write beside it. */
static const parse_sample parse_samples[] = {
    /* Hermes, Qwen 2.5 and 3 */
    {"hermes", NULL, 0, 0, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"Paris\", \"i\": 1.0}}\n</tool_call>",
     "<f#:{\"s\": \"Paris\", \"i\": 1.0}>"},
    {"hermes", NULL, 0, 0, "I look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n<tool_call>{\"name\":\"g\"}</tool_call>\n",
     "I look.<f#:{}><g#:{}>"},
    {"hermes", NULL, 0, 0, "<tool_call>{\"arguments\": {\"a\": \"</tool_call>\"}, \"name\": \"f\"}</tool_call>", "<f#:{\"a\": \"</tool_call>\"}>"},
    {"hermes", NULL, 0, 0, "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>", "<f#:{\"a\": 1}>"},
    {"hermes", NULL, 0, 0, "<tool_call>{\"name\": \"f\", \"arguments\": null}", "<f#:{}>"},
    {"hermes", NULL, 0, 0, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"1\n2\"}}</tool_call>", "<f#:{\"a\": \"1\\n2\"}>"},
    {"hermes", NULL, 0, 0, "<tool_call>{\"name\": \"a\\u00e9\\\"\", \"why\": [1, {\"name\": 2}], \"arguments\": {\"name\": \"x\"}}</tool_call> ok",
     "<aé\"#:{\"name\": \"x\"}> ok"},
    {"hermes", NULL, 0, 1, "<tool_call>{\"name\":\"f\"}</tool_call><tool_call>{\"name\":\"g\"}</tool_call>", "<f#:{}>"},
    /* Qwen3-Coder: the schema's types decide */
    {"qwen3_coder", NULL, 0, 0,
     "Well.\n\n<tool_call>\n<function=f>\n<parameter=s>\n1\n2\"\n\n</parameter>\n<parameter=i>\n5\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n"
     "<parameter=o>\n{\"a\": [1, 2]}\n</parameter>\n<parameter=n>\nnull\n</parameter>\n<parameter=u>\n1e2\n</parameter>\n</function>\n</tool_call>",
     "Well.<f#:{\"s\": \"1\\n2\\\"\\n\", \"i\": 5, \"b\": true, \"o\": {\"a\": [1, 2]}, \"n\": null, \"u\": 1e2}>"},
    {"qwen3_coder", NULL, 0, 0, "<tool_call>\n<function=f>\n<parameter=i>five</parameter><parameter=n>7</parameter><parameter=x>7</parameter>"
     "<parameter=e>1</parameter><parameter=a>2.5</parameter><parameter=s></parameter></function></tool_call>",
     "<f#:{\"i\": \"five\", \"n\": \"7\", \"x\": \"7\", \"e\": \"1\", \"a\": 2.5, \"s\": \"\"}>"},
    {"qwen3_coder", NULL, 0, 0, "<tool_call><function=g></function></tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>", "<g#:{}><g#:{}>"},
    {"qwen3_coder", NULL, 0, 0, "So:\n<function=f>\n<parameter=i>\n1\n</parameter>\n</function>\n</tool_call> ok", "So:<f#:{\"i\": 1}> ok"},
    {"qwen3_coder", NULL, 0, 0, "<tool_call><function=f><parameter=s><b></para</parameter></function></tool_call>", "<f#:{\"s\": \"<b></para\"}>"},
    {"glm45", NULL, 0, 0, "<tool_call>r<arg_key>o</arg_key><arg_value>{\"n\": 1}</arg_value><arg_key>c</arg_key><arg_value>5</arg_value><arg_key>d</arg_key>"
     "<arg_value>5</arg_value><arg_key>e</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>7</arg_value><arg_key>u</arg_key><arg_value>7</arg_value>"
     "<arg_key>m</arg_key><arg_value>1</arg_value><arg_key>x</arg_key><arg_value>1</arg_value><arg_key>y</arg_key><arg_value>1</arg_value></tool_call>"
     "<tool_call>q<arg_key>s</arg_key><arg_value>1</arg_value></tool_call>",
     "<r#:{\"o\": {\"n\": 1}, \"c\": \"5\", \"d\": 5, \"e\": \"1\", \"a\": \"7\", \"u\": 7, \"m\": \"1\", \"x\": 1, \"y\": 1}><q#:{\"s\": \"1\"}>"},
    /* names that are empty, or have spaces or the bytes that end them; those that only a pattern or additionalProperties allow */
    {"qwen3_coder", NULL, 0, 0, "<tool_call><function=k><parameter=>1</parameter><parameter= k >2</parameter><parameter=p >3</parameter><parameter=a\"b>c>4</parameter>"
     "<parameter=a>5</parameter><parameter=n_x>6</parameter><parameter=x_s>7</parameter><parameter=s_s>8</parameter><parameter=z>true</parameter></function></tool_call>",
     "<k#:{\"\": 1, \" k \": 2, \"p\": \"3\", \"a\\\"b>c\": 4, \"a\": 5, \"n_x\": 6, \"x_s\": \"7\", \"s_s\": \"8\", \"z\": true}>"},
    {"glm45", NULL, 0, 0, "<tool_call>k\n<arg_key></arg_key><arg_value>1</arg_value><arg_key> k </arg_key><arg_value>2</arg_value><arg_key>n_x\n</arg_key><arg_value>6</arg_value></tool_call>",
     "<k#:{\"\": 1, \" k \": 2, \"n_x\": 6}>"},
    {"minimax_m2", NULL, 0, 0, "<minimax:tool_call><invoke name=\"k\"><parameter name=\"\">1</parameter><parameter name=\" k \">2</parameter><parameter name=\"q\">no</parameter></invoke></minimax:tool_call>",
     "<k#:{\"\": 1, \" k \": 2, \"q\": \"no\"}>"},
    {"glm45", NULL, 0, 0, "<tool_call>any<arg_key>x</arg_key><arg_value>[1]</arg_value></tool_call><tool_call>g<arg_key>x</arg_key><arg_value>[1]</arg_value></tool_call>"
     "<tool_call>two<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>x</arg_value><arg_key>c</arg_key><arg_value>3</arg_value></tool_call>",
     "<any#:{\"x\": [1]}><g#:{\"x\": \"[1]\"}><two#:{\"a\": \"1\", \"b\": \"x\", \"c\": 3}>"},
    {"glm45", NULL, 0, 0, "<tool_call>all<arg_key>a</arg_key><arg_value>5</arg_value><arg_key>b</arg_key><arg_value>null</arg_value><arg_key>c</arg_key><arg_value>5</arg_value>"
     "<arg_key>d</arg_key><arg_value>5</arg_value></tool_call>", "<all#:{\"a\": \"5\", \"b\": null, \"c\": 5, \"d\": \"5\"}>"},
    {"glm45", NULL, 0, 0, "<tool_call>g<arg_key></arg_key><arg_value>1</arg_value></tool_call>", "<tool_call>g<arg_key></arg_key><arg_value>1</arg_value></tool_call>"},
    {"seed_oss", NULL, 0, 0, "<seed:tool_call>\n<function=f>\n<parameter=s>x</parameter>\n</function>\n</seed:tool_call>", "<f#:{\"s\": \"x\"}>"},
    /* GLM 4.5, 4.6 with line feeds, 4.7 without */
    {"glm45", NULL, 0, 0, "\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x y</arg_value>\n<arg_key>i</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
     "<f#:{\"s\": \"x y\", \"i\": 3}>"},
    {"glm47", NULL, 0, 0, "<tool_call>f<arg_key>l</arg_key><arg_value>[1,\"é\"]</arg_value></tool_call><tool_call>g</tool_call>",
     "<f#:{\"l\": [1,\"é\"]}><g#:{}>"},
    {"glm47", NULL, 0, 0, "<tool_call>f<arg_key>s</arg_key><arg_value>\nx\n\ny\n</arg_value><arg_key>n</arg_key><arg_value>\nx\n</arg_value><arg_key>i</arg_key>"
     "<arg_value>\n5\n</arg_value><arg_key>b</arg_key><arg_value> True\n</arg_value></tool_call>",
     "<f#:{\"s\": \"\\nx\\n\\ny\\n\", \"n\": \"\\nx\\n\", \"i\": 5, \"b\": true}>"},
    {"minimax_m2", NULL, 0, 0, "a\n<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"s\">x</parameter>\n<parameter name=\"i\">1</parameter>\n"
     "</invoke>\n<invoke name=\"g\">\n</invoke>\n</minimax:tool_call>", "a<f#:{\"s\": \"x\", \"i\": 1}><g#:{}>"},
    /* DeepSeek */
    {"deepseek_v3", NULL, 0, 0, "Hi" DS_CALLS DS_CALL "function" DS_SEP "f\n```json\n{\"s\": \"```\"}\n```" DS_END "\n" DS_CALL "function" DS_SEP
     "g\n```json\n{}\n```" DS_END DS_CALLS_END, "Hi<f#:{\"s\": \"```\"}><g#:{}>"},
    {"deepseek_v31", NULL, 0, 0, DS_CALLS DS_CALL "f" DS_SEP "{\"i\": 1}" DS_END DS_CALL "g" DS_SEP "{}" DS_END DS_CALLS_END, "<f#:{\"i\": 1}><g#:{}>"},
    {"deepseek_v31", NULL, 0, 0, DS_CALL "f" DS_SEP "{\"i\": 1}", "<f#:{\"i\": 1}>"},
    {"deepseek_v32", NULL, 0, 0, "a\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"i\" string=\"true\">1"
     "</｜DSML｜parameter>\n<｜DSML｜parameter name=\"s\" string=\"false\">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
     "a<f#:{\"i\": \"1\", \"s\": [1]}>"},
    {"deepseek_v4", NULL, 0, 0, "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"g\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>", "<g#:{}>"},
    /* Kimi: the id has the name */
    {"kimi_k2", NULL, 0, 0, "ok<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"i\": 1}<|tool_call_end|>"
     "<|tool_call_begin|>functions.g2:12<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
     "ok<f#functions.f:0:{\"i\": 1}><g2#functions.g2:12:{}>"},
    {"kimi_k2", NULL, 0, 0, "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"i\": 1}<|tool_call_end|>"
     "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>functions.f:00<|tool_call_argument_begin|>{}<|tool_call_end|>"
     "<|tool_calls_section_end|>", "<f#functions.f:0:{\"i\": 1}><f#functions.f:1:{}><f#functions.f:2:{}>"},
    /* Mistral, before and from tokenizer v11 */
    {"mistral", NULL, 0, 0, "[TOOL_CALLS]f[ARGS]{\"i\": 1}[TOOL_CALLS]g[CALL_ID]abcdefgh1[ARGS]{}", "<f#:{\"i\": 1}><g#abcdefgh1:{}>"},
    {"granite", NULL, 0, 0, "<|tool_call|> [\n {\"name\": \"f\", \"arguments\": {\"s\": \"]\"}},\n {\"arguments\": {}, \"name\": \"g\"}\n]",
     "<f#:{\"s\": \"]\"}><g#:{}>"},
    {"phi4_mini", NULL, 0, 0, "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"s\": \"x\"}}]<|/tool_call|>", "<f#:{\"s\": \"x\"}>"},
    {"phi4_mini_json", NULL, 0, 0, "functools[{\"name\": \"f\", \"arguments\": {\"i\": 7}}]", "<f#:{\"i\": 7}>"},
    {"nemotron_json", NULL, 0, 0, "<TOOLCALL>[{\"name\": \"f\", \"arguments\": {}}]</TOOLCALL>", "<f#:{}>"},
    /* Llama: an answer that is JSON and no call */
    {"llama3_json", NULL, 0, 0, "{\"name\": \"f\", \"parameters\": {\"s\": \"x\"}}", "<f#:{\"s\": \"x\"}>"},
    {"llama3_json", NULL, 0, 0, "<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {\"i\": 2}}",
     "<f#:{}><g#:{\"i\": 2}>"},
    {"llama3_json", NULL, 0, 0, "{\"answer\": {\"name\": \"f\"}}", "{\"answer\": {\"name\": \"f\"}}"},
    {"llama3_json", NULL, 0, 0, "{\"name\": \"Bob\", \"type\": 3}", "{\"name\": \"Bob\", \"type\": 3}"},
    {"llama3_json", NULL, 0, 0, " So: {\"name\": \"f\", \"parameters\": {}}", " So: {\"name\": \"f\", \"parameters\": {}}"},
    {"llama3_json", NULL, 0, 0, "<|python_tag|>search.call(query=\"x\")", "<|python_tag|>search.call(query=\"x\")"},
    /* Python's form */
    {"pythonic", NULL, 0, 0, "[f(s='it\\'s \"x\"\\n', i=-1.5e3, b=True, o={'a': None, \"b\": (1, 2)}, l=[]), g()]",
     "<f#:{\"s\": \"it's \\\"x\\\"\\n\", \"i\": -1.5e3, \"b\": true, \"o\": {\"a\": null, \"b\": [1, 2]}, \"l\": []}><g#:{}>"},
    {"llama4_pythonic", NULL, 0, 0, "<|python_start|>[f(s=\"a)\\d\\u00e9\\x41\")]<|python_end|>", "<f#:{\"s\": \"a)\\\\d\\u00e9\\u0041\"}>"},
    {"pythonic", NULL, 0, 0, "[1, 2] are", "[1, 2] are"},
    {"pythonic", NULL, 0, 0, "[f(l=[1,2, ], o={'a': (1,),}, s='\\U0001F600\\U0000000a')]", "<f#:{\"l\": [1,2], \"o\": {\"a\": [1]}, \"s\": \"😀\\n\"}>"},
    {"pythonic", NULL, 0, 0, "[f(l=[1,,2])]", "[f(l=[1,,2])]"},
    {"pythonic", NULL, 0, 0, "[f(s='\\U0001F60')]", "[f(s='\\U0001F60')]"},
    {"pythonic", NULL, 0, 0, "[f(s='\\U00110000')]", "[f(s='\\U00110000')]"},
    {"pythonic", NULL, 0, 0, "[2fa(a=1), 3()]", "<2fa#:{\"a\": 1}><3#:{}>"},
    {"pythonic", NULL, 0, 0, "[1.5, 2e3", "[1.5, 2e3"},
    {"pythonic", NULL, 0, 0, "print(a=1) [f()]", "print(a=1) [f()]"},
    {"pythonic", NULL, 0, 0, "[f(1)]", "[f(1)]"},
    {"pythonic", NULL, 0, 0, "[f(a=b'1')]", "[f(a=b'1')]"},
    {"pythonic", NULL, 0, 0, "[f(a=1 2)]", "[f(a=1 2)]"},
    {"pythonic", NULL, 0, 0, "[f(a=[1)]", "[f(a=[1)]"},
    {"lfm2", NULL, 0, 0, "<|tool_call_start|>[2fa(s=\"y\")]<|tool_call_end|>", "<2fa#:{\"s\": \"y\"}>"},
    {"lfm2", NULL, 0, 0, "x<|tool_call_start|>[f(s=\"y\")]<|tool_call_end|>", "x<f#:{\"s\": \"y\"}>"},
    /* malformed and unfinished: text as it was written */
    {"hermes", NULL, 0, 0, "<tool_call>\n{'name': 'f'}\n</tool_call>", "<tool_call>\n{'name': 'f'}\n</tool_call>"},
    {"hermes", NULL, 0, 0, "a <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1", "a <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1"},
    {"hermes", NULL, 0, 0, "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>", "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>"},
    {"hermes", NULL, 0, 0, "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>", "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>"},
    {"hermes", NULL, 0, 0, "<tool_call>{\"name\": ]}{\"name\"</tool_call>", "<tool_call>{\"name\": ]}{\"name\"</tool_call>"},
    {"hermes", NULL, 0, 0, "the tag <tool_call> and <tool_call><tool_call>{\"name\":\"f\"}</tool_call>", "the tag <tool_call> and <tool_call><f#:{}>"},
    {"hermes", NULL, 0, 0, "  plain < text <tool_cal\n", "  plain < text <tool_cal\n"},
    /* what comes after it is read */
    {"hermes", NULL, 0, 0, "<tool_call>{\"name\":\"f\"}\n<tool_call>{\"name\":\"g\"}</tool_call>", "<tool_call>{\"name\":\"f\"}<g#:{}>"},
    {"hermes", NULL, 0, 0, "<tool_call>{\"name\":\"f\"}<tool_x", "<tool_call>{\"name\":\"f\"}<tool_x"},
    {"qwen3_coder", NULL, 0, 0, "<tool_call><function=f><parameter=s>1</parameter>\n<tool_call><function=g></function></tool_call>",
     "<tool_call><function=f><parameter=s>1</parameter><g#:{}>"},
    {"glm45", NULL, 0, 0, "<tool_call>f<arg_key>s</arg_key><arg_value>1</arg_value>\n<tool_call>g</tool_call>",
     "<tool_call>f<arg_key>s</arg_key><arg_value>1</arg_value><g#:{}>"},
    {"deepseek_v31", NULL, 0, 0, DS_CALLS "\n" DS_CALL DS_SEP "{}", DS_CALLS "\n" DS_CALL DS_SEP "{}"},
    {"kimi_k2", NULL, 0, 0, "<|tool_calls_section_begin|> no <|tool_calls_section_end|>", "<|tool_calls_section_begin|> no <|tool_calls_section_end|>"},
    {"qwen3_coder", NULL, 0, 0, "<tool_call><function=f><parameter=s>x</parameter></tool_call>",
     "<tool_call><function=f><parameter=s>x</parameter></tool_call>"},
    /* reasoning */
    {NULL, "qwen3", 0, 0, "<think>\nI add.\n\nYes.\n</think>\n\nIt is 3.\n", "<r:I add.\n\nYes.>It is 3.\n"},
    {NULL, "qwen3", 1, 0, "I add.\n</think>\n\nIt is 3.", "<r:I add.>It is 3."},
    {NULL, "qwen3", 0, 0, "It is 3 <think>x</think>", "It is 3 <think>x</think>"},
    {NULL, "qwen3", 0, 0, "  <thin", "  <thin"},
    {NULL, "qwen3", 1, 0, "I add </thi", "<r:I add </thi>"},
    {NULL, "qwen3", 1, 0, "</think>3", "3"},
    {NULL, "mistral", 0, 0, "[THINK]a[/THINK]b", "<r:a>b"},
    /* texts around the content */
    {NULL, "hunyuan_a13b", 0, 0, "<think>\nHm.\n</think>\n<answer>\nIt is <answer> 3.\n</answer>\n", "<r:Hm.>It is <answer> 3."},
    {NULL, "hunyuan_a13b", 1, 0, "x</think>\n3 <answer>4</answer> \n", "<r:x>3 <answer>4</answer> \n"},
    {NULL, "hunyuan_a13b", 0, 0, "\n<answer> 3</answ</answer> or </answer>", "3</answor </answer>"},
    {NULL, "hunyuan_a13b", 0, 0, "<answer>3</ans", "3</ans"},
    {"mistral", "hunyuan_a13b", 1, 0, "x</think><answer>\na [TOOL_CALLS]g[ARGS]{}\n</answer>", "<r:x>a<g#:{}>"},
    {"hermes", "hunyuan_a13b", 1, 0, "x</think><answer><tool_call>{\"name\":\"g\"}</tool_call></answer>", "<r:x><g#:{}>"},
    {NULL, "ernie45", 1, 0, "a\n</think>\n\n<response>\nb\n</response>\n", "<r:a>b"},
    {NULL, "ernie45", 1, 0, "a\n</think>\nb", "<r:a>b"},
    {"llama3_json", "ernie45", 1, 0, "a</think><response>\n{\"a\": 1}\n</response>", "<r:a>{\"a\": 1}"},
    {"hermes", "ernie45", 1, 0, "a</think><response>x <tool_call>{7</response>", "<r:a>x <tool_call>{7"},
    {NULL, "granite", 0, 0, "Here is my thought process: a\nHere is my response: b", "<r:a>b"},
    {NULL, "gemma4", 0, 0, "<|channel>thought\na<channel|>b", "<r:a>b"},
    {"hermes", "qwen3", 0, 0, "<think>I call <tool_call>{\"name\":\"f\"}</tool_call></think>\n<tool_call>{\"name\":\"g\"}</tool_call>",
     "<r:I call <tool_call>{\"name\":\"f\"}</tool_call>><g#:{}>"},
    {"hermes", "qwen3", 0, 0, "\n<tool_call>{\"name\":\"g\"}</tool_call>", "<g#:{}>"},
    {"llama3_json", "qwen3", 1, 0, "x</think>\n\n{\"name\": \"f\", \"parameters\": {}}", "<r:x><f#:{}>"},
    {NULL, "qwen3", 1, 0, "", ""},
    /* harmony; the recipient stands in the role or in the channel */
    {"openai", "openai_gptoss", 0, 0, "<|channel|>analysis<|message|> Look.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
     "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{\"s\": \"<|x\"}<|call|>",
     "<r: Look.>I look.<f#:{\"s\": \"<|x\"}>"},
    {"openai", "openai_gptoss", 0, 0, "<|channel|>commentary to=functions.f code<|message|>{}<|call|>", "<f#:{}>"},
    {"openai", "openai_gptoss", 0, 0, "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"s\": \"x\"}", "<f#:{\"s\": \"x\"}>"},
    {"openai", "openai_gptoss", 0, 1, "<|channel|>commentary to=f json<|message|>{}<|call|><|start|>assistant to=g<|channel|>commentary<|message|>{}", "<f#:{}>"},
    {NULL, "openai_gptoss", 0, 0, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant"
     "<|channel|>final<|message|>c\n<|end|><|start|>assistant<|channel|>final<|message|>d<|return|>", "<r:a\nb>c\n\nd"},
    {NULL, "openai_gptoss", 0, 0, "<|channel|>commentary to=browser.search code<|message|>{\"q\": 1}<|call|>", "<r:{\"q\": 1}>"},
    /* text that spells a mark, of a model without tokens for the marks: it is text in a string of the arguments only */
    {"openai", "openai_gptoss", 0, 0, "<|channel|>commentary to=functions.f<|message|>{\"s\": \"a\\\"<|call|><|start|>\n\"}<|call|><|start|>assistant<|channel|>final<|message|>x<|end|>y",
     "<f#:{\"s\": \"a\\\"<|call|><|start|>\\n\"}>x\ny"},
    /* what a model should not write */
    {"openai", "openai_gptoss", 0, 0, "Just text.", "Just text."},
    {"openai", "openai_gptoss", 0, 0, "<|channel|>final<|message|>a<|end|>b<|end|>", "a\nb"},
    {"openai", "openai_gptoss", 0, 0, "<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "<r:a>b"},
    {"openai", "openai_gptoss", 0, 0, "<|channel|>analysis<|return|>", ""},
    {"openai", "openai_gptoss", 0, 0, "<|channel|>analysis", ""},
    {"openai", "openai_gptoss", 0, 0, "<|message|>a", "a"},
    {"openai", "openai_gptoss", 0, 0, "<|channel|>analysis to=python code<|message|>print(1)<|call|>", "<r:print(1)>"},
    {"openai", "openai_gptoss", 0, 0, "<|channel|>commentary to=python code<|message|>{\"a\": 1}<|call|>", "<r:{\"a\": 1}>"},
    {"openai", "openai_gptoss", 0, 0, "<|channel|>commentary to=functions.no<|message|>{\"a\": 1}<|call|>", "<no#:{\"a\": 1}>"},
    {"openai", "openai_gptoss", 0, 0, "Well, <|start|>assistant Now the answer is 5.", "Well, \nNow the answer is 5."},
    {"openai", "openai_gptoss", 0, 0, "<|start|>assistant to the point: 5.<|end|><|channel|>final<|message|>6", "to the point: 5.\n6"},
    {NULL, "openai_gptoss", 0, 0, "to=be or not", "to=be or not"},
    {NULL, "openai_gptoss", 0, 0, "to", "to"},
    {NULL, "openai_gptoss", 0, 0, "<", "<"},
    {"openai", "openai_gptoss", 0, 0, "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json", ""},
    {"openai", "openai_gptoss", 0, 0, "to=functions.f", ""},
    {"openai", "openai_gptoss", 0, 0, "<|star<|channel|>final<|message|>a", "<|star\na"},
    {"openai", "openai_gptoss", 0, 0, "<|channel|>commentary to=functions.f<|message|>{\"s\": <|call|>",
     "<|channel|>commentary to=functions.f<|message|>{\"s\": "},
    {"openai", "openai_gptoss", 0, 0, "<|start|>assistant<|channel|>commentary to=functions.f\"!<|constrain|>json<|message|>{}<|call|>", "<f#:{}>"},
    {"hermes", NULL, 0, 0, "", ""},
};

/* Feeds texts, of which those that begin with a byte 1 are special tokens. by_byte: each text but these byte by byte. */
static void parse_feed_tokens(const parse_setup *setup, const char *const *tokens, bool by_byte, buf *out) {
    parser p;
    parser_init(&p, setup);
    for (; *tokens; tokens++) {
        const bool special = tokens[0][0] == 1;
        const str text = str_c(*tokens + special);
        for (size_t i = 0; i < text.n; i += by_byte && !special ? 1 : text.n)
            parser_feed_token(&p, by_byte && !special ? str_sub(text, i, i + 1) : text, special ? text : STR(""));
    }
    parser_end(&p);
    parse_show(&p, out);
    parser_free(&p);
}

/* If the marks of harmony are tokens, text that spells one is text: in arguments, reasoning, content and headers. */
static void test_parse_marks(void) {
    static const struct {
        const char *tokens[20], *want;
    } rows[] = {
        {{"\1<|channel|>", "commentary to=functions.f ", "\1<|constrain|>", "json", "\1<|message|>", "{\"s\": \"<|call|> <|start|>x<|message|>\"}", "\1<|call|>"},
         "<f#:{\"s\": \"<|call|> <|start|>x<|message|>\"}>"},
        {{"\1<|channel|>", "analysis", "\1<|message|>", "<|end|> ends", "\1<|end|>", "\1<|start|>", "assistant", "\1<|channel|>", "final", "\1<|message|>",
          "Write <|return|> or <|channel|>final<|message|>.", "\1<|return|>"},
         "<r:<|end|> ends>Write <|return|> or <|channel|>final<|message|>."},
        {{"<|channel|>final<|message|>a", "\1<|end|>", "to", "\1<|channel|>", "final", "\1<|message|>", "b"}, "<|channel|>final<|message|>a\nto\nb"},
        {{"\1<|channel|>", "commentary to=functions.f", "\1<|message|>", "{\"s\": \"x", "\1<|call|>", "\1<|start|>", "assistant", "\1<|channel|>", "final", "\1<|message|>", "b"},
         "<|channel|>commentary to=functions.f<|message|>{\"s\": \"xb"},
        {{"\1<|channel|>", "final", "\1<|message|>", "a", "\1<|end"}, "a<|end"},
        {{"\1<|channel|>", "final", "\1<|message|>", "a<|en", "d|>", "\1<|end|>", "b"}, "a<|end|>\nb"}};
    for (int i = 0; i < COUNT(rows); i++) {
        arena memory = {0};
        const parse_sample sample = {.format = "openai", .family = "openai_gptoss"};
        parse_setup setup = parse_test_setup(&sample, &memory);
        buf out = {0};
        setup.has_mark_tokens = true;
        for (int by_byte = 0; by_byte < 2; by_byte++) {
            parse_feed_tokens(&setup, rows[i].tokens, by_byte, &out);
            CHECK_MSG(str_is(buf_view(&out), rows[i].want), "row %d, %d:\n  got  %s\n  want %s", i, by_byte, out.p, rows[i].want);
        }
        buf_free(&out), arena_free(&memory);
    }
}

/* The numbers in the ids of Kimi go on where the history ends. */
static void test_parse_counted_ids(void) {
    static const char *const given[] = {"f:0", "f:0", "f:3", "f", "f:7", "f:99999999999"};
    static const char want[] = "<f#functions.f:2:{}><f#functions.f:3:{}><f#functions.f:4:{}><f#functions.f:5:{}><f#functions.f:7:{}><f#functions.f:8:{}>";
    arena memory = {0};
    const parse_sample sample = {.format = "kimi_k2"};
    parse_setup setup = parse_test_setup(&sample, &memory);
    buf text = {0}, out = {0};
    setup.next_id = 2;
    buf_c(&text, "<|tool_calls_section_begin|>");
    for (int i = 0; i < 6; i++)
        buf_printf(&text, "<|tool_call_begin|>functions.%s<|tool_call_argument_begin|>{}<|tool_call_end|>", given[i]);
    for (size_t n = 1; n < text.n; n += 7) {
        parse_in_pieces(&setup, buf_view(&text), n, n, &out);
        CHECK_MSG(str_is(buf_view(&out), want), "%s", out.p);
    }
    CHECK(parse_id_number(STR("functions.f:12")) == 12 && parse_id_number(STR(":1")) == 1);
    CHECK(parse_id_number(STR("12")) == -1 && parse_id_number(STR("")) == -1 && parse_id_number(STR("f:")) == -1 && parse_id_number(STR("f:1234567890")) == -1);
    buf_free(&text), buf_free(&out), arena_free(&memory);
}

static void test_parse_samples(void) {
    for (int i = 0; i < COUNT(parse_samples); i++) parse_check(&parse_samples[i]);
    /* every row of the tables has a sample */
    for (int i = 0; i < COUNT(parse_formats); i++) {
        int n = 0;
        for (int j = 0; j < COUNT(parse_samples); j++)
            n += parse_samples[j].format && parse_find_format(parse_samples[j].format, STR("")) == &parse_formats[i];
        CHECK_MSG(n || (parse_formats[i].flags & PARSE_SHORT_IDS && parse_formats[i].open), "%s has no sample", parse_formats[i].names);
    }
}

/* An answer that is calls or JSON by a response_format: content that has begun has no calls. */
static void test_parse_calls_or_content(void) {
    static const struct {
        const char *format, *family, *text, *want;
    } rows[] = {
        {"qwen3_coder", NULL, "{\"a\": \"use <tool_call><function=f></function></tool_call> so\"}",
         "{\"a\": \"use <tool_call><function=f></function></tool_call> so\"}"},
        {"qwen3_coder", "qwen3", "<think>x</think>\n[\"<function=f></function>\"]", "<r:x>[\"<function=f></function>\"]"},
        {"glm45", NULL, "\"<tool_call>f</tool_call>", "\"<tool_call>f</tool_call>"},
        {"glm45", NULL, "<<tool_call>f</tool_call>", "<<tool_call>f</tool_call>"},
        {"mistral", NULL, "{\"a\":\"x [TOOL_CALLS]f[ARGS]{} y\"}", "{\"a\":\"x [TOOL_CALLS]f[ARGS]{} y\"}"},
        {"mistral", "qwen3", "\n[TOOL_CALLS]f[ARGS]{}", "<f#:{}>"},
        {"llama3_json", NULL, "{\"name\": \"Bob\", \"parameters\": {}}", "{\"name\": \"Bob\", \"parameters\": {}}"},
        {"llama3_json", NULL, "{\"parameters\": {}, \"name\": \"Bob\"}", "{\"parameters\": {}, \"name\": \"Bob\"}"},
        {"llama3_json", NULL, "{\"name\": \"f\", \"parameters\": {}}", "<f#:{}>"}};
    for (int i = 0; i < COUNT(rows); i++) {
        arena memory = {0};
        const parse_sample sample = {.format = rows[i].format, .family = rows[i].family};
        parse_setup setup = parse_test_setup(&sample, &memory);
        const str text = str_c(rows[i].text);
        buf out = {0};
        setup.calls_or_content = true;
        for (size_t n = 1; n <= text.n; n++) {
            parse_in_pieces(&setup, text, n, n == 1 ? 1 : text.n, &out);
            CHECK_MSG(str_is(buf_view(&out), rows[i].want), "row %d, cut at %zu: %s\n  got  %s\n  want %s", i, n, rows[i].text, out.p, rows[i].want);
        }
        buf_free(&out), arena_free(&memory);
    }
}

/* A hostile schema: its references fan out, but few of them are followed. */
static void test_parse_hostile_types(void) {
    arena memory = {0};
    toka_err e;
    buf text = {0};
    parse_tool *list;
    buf_c(&text, "[{\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":{\"a\":{\"$ref\":\"#/$defs/a\"},\"s\":{\"type\":\"string\"}},\"$defs\":{\"a\":{\"anyOf\":[");
    for (int i = 0; i < 2000; i++) buf_c(&text, i ? ",{\"$ref\":\"#/$defs/a\"}" : "{\"$ref\":\"#/$defs/a\"}");
    buf_c(&text, "]}}}}}]");
    const json *tools = json_parse(&memory, buf_view(&text), json_trusted, &e);
    const double begin = os_now();
    CHECK(parse_tools_init(&memory, tools, &list) == 1 && list[0].n_params == 2 && !list[0].params[0].types);
    CHECK_MSG(os_now() - begin < 3, "%.1f s", os_now() - begin);
    /* patterns: few are read, none that is large */
    buf_clear(&text);
    buf_c(&text, "[{\"function\":{\"name\":\"f\",\"parameters\":{\"patternProperties\":{\"(a{1,9999}){1,9999}\":{\"type\":\"null\"}");
    for (int i = 0; i < 3000; i++) buf_printf(&text, ",\"x{1,9}%d\":{\"type\":\"integer\"}", i);
    buf_c(&text, "}}}}]");
    const double begin_patterns = os_now();
    CHECK(parse_tools_init(&memory, json_parse(&memory, buf_view(&text), json_trusted, &e), &list) == 1 && list[0].n_params <= 16);
    const parse_setup setup = {.format = parse_find_format("glm45", STR("")), .tools = list, .n_tools = 1};
    buf_clear(&text), buf_c(&text, "<tool_call>f");
    for (int i = 0; i < 200; i++) buf_c(&text, "<arg_key>y</arg_key><arg_value>1</arg_value>");
    buf out = {0};
    parse_in_pieces(&setup, buf_view(&text), text.n, 1, &out);
    CHECK_MSG(os_now() - begin_patterns < 3, "%.1f s", os_now() - begin_patterns);
    buf_free(&text), buf_free(&out), arena_free(&memory);
}

/* Mistral's older form: its name is also that of the newer one, so the template decides. */
static void test_parse_names(void) {
    const parse_format *old = parse_find_format("mistral", STR("[TOOL_CALLS]")), *new = parse_find_format("mistral", STR("[TOOL_CALLS] [ARGS]"));
    CHECK(old && new && old->open && !new->open);
    CHECK(!parse_find_format("mistra", STR("")) && !parse_find_format("istral", STR("")) && !parse_find_format("", STR("")));
    CHECK(!parse_find_format("hermes qwen", STR("")) == !parse_is_listed("hermes qwen granite4 ", "hermes qwen"));
    CHECK(!parse_find_format(NULL, STR("")) && !parse_find_family(NULL, STR("<think>")));
    CHECK(!parse_find_family(NULL, STR("<think></think>"))->answer[0] && parse_find_family(NULL, STR("<think></think>'<answer>'"))->answer[0][1] == 'a');
    arena memory = {0};
    const parse_setup setup = {.format = old};
    buf out = {0};
    str text = STR("[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\", \"arguments\": {}}]");
    for (size_t n = 1; n < text.n; n++) {
        parse_in_pieces(&setup, text, n, n, &out);
        CHECK_MSG(!strcmp(out.p, "<f#:{\"a\": 1}><g#:{}>"), "%s", out.p);
    }
    buf_free(&out);
    arena_free(&memory);
}

/* A long call that a constraint makes valid is delivered while it is written. If it breaks off, it stays a call. Else a call is held
 * until it is complete, and is text if it does not become one. */
static void test_parse_long_calls(void) {
    static const struct {
        const char *format, *head, *tail, *want_head, *want_tail;
    } rows[] = {
        {"hermes", "<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"", "\"}}</tool_call>", "<f#:{\"s\": \"", "\"}>"},
        {"hermes", "<tool_call>{\"arguments\": {\"s\": \"", "\"}, \"name\": \"f\"}</tool_call>", "<f#:{\"s\": \"", "\"}>"},
        {"hermes", "<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"", "", "<f#:{\"s\": \"", ">"},
        {"qwen3_coder", "<tool_call><function=f><parameter=s>", "</parameter></function></tool_call>", "<f#:{\"s\": \"", "\"}>"},
        {"qwen3_coder", "<tool_call><function=f><parameter=s>", "</parameter>junk", "<f#:{\"s\": \"", "\">junk"},
        {"pythonic", "[f(s='", "')]", "<f#:{\"s\": \"", "\"}>"},
        {"openai", "<|channel|>commentary to=f<|message|>{\"s\": \"", "\"}<|call|>", "<f#:{\"s\": \"", "\"}>"},
        {"deepseek_v31", DS_CALLS DS_CALL "f" DS_SEP "{\"s\": \"", "\"}" DS_END DS_CALLS_END, "<f#:{\"s\": \"", "\"}>"}};
    for (int i = 0; i < COUNT(rows); i++) {
        buf text = {0}, want = {0};
        buf_c(&text, rows[i].head), buf_c(&want, rows[i].want_head);
        for (int k = 0; k < 2 * PARSE_HELD_BYTES; k++) buf_char(&text, 'x'), buf_char(&want, 'x');
        buf_c(&text, rows[i].tail), buf_c(&want, rows[i].want_tail);
        parse_sample sample = {.format = rows[i].format, .text = text.p, .want = want.p};
        parse_valid_calls = true;
        parse_check(&sample);
        /* not all of it comes at the end */
        arena memory = {0};
        const parse_setup setup = parse_test_setup(&sample, &memory);
        parser p;
        parser_init(&p, &setup);
        parser_feed(&p, str_sub(buf_view(&text), 0, text.n - strlen(rows[i].tail)));
        CHECK_MSG((p.events.n > PARSE_HELD_BYTES) == !strstr(rows[i].tail, "name"), "%s: %zu", rows[i].format, p.events.n);
        parser_free(&p);
        const bool breaks = !rows[i].tail[0] || strstr(rows[i].tail, "junk");
        if (breaks) sample.want = text.p;
        parse_valid_calls = false;
        parse_check(&sample);
        buf_free(&text), buf_free(&want);
        arena_free(&memory);
    }
}

/* Stop strings end an answer in its content only, wherever the text is cut. White space before a call is no content, unless it
 * completes a stop string. */
static void test_parse_stops(void) {
    static const struct {
        const char *format, *family;
        bool thinking, include;
        const char *stop[2], *text, *want;
        int matched;
    } rows[] = {
        {NULL, "qwen3", 0, 0, {"noon", "wants"}, "<think>He wants noon.</think>\n\nIt is noon, he wants", "<r:He wants noon.>It is ", 0},
        {NULL, "qwen3", 1, 1, {"noon"}, "noon</think>at noon!", "<r:noon>at noon", 0},
        {NULL, "qwen3", 1, 0, {"no", "</think>"}, "no </think>maybe", "<r:no>maybe", -1},
        {"hermes", "qwen3", 0, 0, {"f", "}"}, "<think>f</think>a <tool_call>{\"name\":\"f\"}</tool_call> b f", "<r:f>a<f#:{}> b ", 0},
        {"hermes", NULL, 0, 0, {"b<tool", "<"}, "a b<tool_call>{\"name\":\"f\"}</tool_call> 1<2", "a b<f#:{}> 1", 1},
        {"hermes", NULL, 0, 0, {"ab"}, "a<tool_call>{\"name\":\"f\"}</tool_call>b", "a<f#:{}>b", -1},
        {"hermes", NULL, 0, 0, {"name", "d"}, "<tool_call>{\"name\": 5}</tool_call>", "<tool_call>{\"", 0},
        {"hermes", NULL, 0, 0, {"\n\n"}, "a \n\nb", "a ", 0},
        {"hermes", NULL, 0, 0, {"\n\n", "a\n"}, "\n\nb", "", 0},
        {"hermes", NULL, 0, 1, {"b \n"}, "ab \n", "ab \n", 0},
        {"hermes", "qwen3", 0, 0, {"\n"}, "<think>x\n</think>\ny\n", "<r:x>y", 0},
        {"llama3_json", NULL, 0, 0, {"name"}, "{\"name\": \"f\", \"parameters\": {}}", "<f#:{}>", -1},
        {"llama3_json", NULL, 0, 0, {"Bob"}, "{\"name\": \"Bob\", \"type\": 3}", "{\"name\": \"", 0},
        {"openai", "openai_gptoss", 0, 0, {"final", "x"}, "<|channel|>analysis<|message|>x final<|end|><|start|>assistant<|channel|>final<|message|>a x",
         "<r:x final>a ", 1},
        {"openai", "openai_gptoss", 0, 0, {"s"}, "<|channel|>commentary to=functions.f<|message|>{\"s\": 1}<|call|>", "<f#:{\"s\": 1}>", -1},
        {NULL, NULL, 0, 0, {"b", "bc"}, "abc", "a", 0}};
    for (int i = 0; i < COUNT(rows); i++) {
        arena memory = {0};
        const parse_sample sample = {.format = rows[i].format, .family = rows[i].family, .thinking = rows[i].thinking};
        parse_setup setup = parse_test_setup(&sample, &memory);
        const str text = str_c(rows[i].text);
        buf out = {0};
        setup.stop = rows[i].stop, setup.n_stop = rows[i].stop[1] ? 2 : 1, setup.include_stop = rows[i].include;
        for (size_t n = 1; n <= text.n; n++) {
            parse_in_pieces(&setup, text, n, n == 1 ? 1 : text.n, &out);
            CHECK_MSG(str_is(buf_view(&out), rows[i].want), "row %d, cut at %zu: %s\n  got  %s\n  want %s", i, n, rows[i].text, out.p, rows[i].want);
        }
        parser p;
        parser_init(&p, &setup);
        parser_feed(&p, text), parser_end(&p);
        CHECK_MSG((p.stop.ended ? p.stop.matched_index : -1) == rows[i].matched, "row %d: %d", i, p.stop.matched_index);
        parser_free(&p);
        /* in the first min_tokens tokens they are text */
        parser_init(&p, &setup);
        p.may_stop = false;
        parser_feed(&p, text), parser_end(&p);
        CHECK(!p.stop.ended);
        parser_free(&p), buf_free(&out), arena_free(&memory);
    }
}

/* Hostile bytes: nothing is lost without a call, and cuts change nothing. */
static void test_parse_random(void) {
    static const char *const pieces[] = {"<tool_call>", "</tool_call>", "{\"name\": \"f\"", ", \"arguments\": {", "}", "{", "[", "]", "\"", "\\", " ", "\n",
                                         "<think>", "</think>", "x", "<function=", "f>", "<parameter=s>", "</parameter>", "</function>", "(", ")", "a=",
                                         "'", ",", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
                                         ";", DS_CALLS, DS_CALL, DS_SEP, DS_END, DS_CALLS_END, "```json", "```", "\xC3\xA9", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "analysis", " to=f", "functions.f:0", "1", "<answer>", "</answer>"};
    uint64_t rng = 1;
    for (int round = 0; round < 4000; round++) {
        buf text = {0}, whole = {0}, cut = {0};
        const int n = (int)(rnd(&rng) % 20);
        for (int i = 0; i < n; i++) buf_c(&text, pieces[rnd(&rng) % COUNT(pieces)]);
        parse_setup setup = {.format = &parse_formats[rnd(&rng) % COUNT(parse_formats)]};
        if (round % 3) setup.family = &parse_families[COUNT(parse_families) - (round % 5 ? 1 : 3)];
        setup.thinking = round % 3 == 2;
        static const char *const stop[] = {"}\n", "ff", "x"};
        if (round % 7 == 6) setup.stop = stop, setup.n_stop = 3;
        parse_in_pieces(&setup, buf_view(&text), text.n, 1, &whole);
        parse_in_pieces(&setup, buf_view(&text), 1, 1 + (size_t)(round % 5), &cut);
        CHECK_MSG(str_eq(buf_view(&whole), buf_view(&cut)), "%s:\n  %s\n  %s", text.p, whole.p, cut.p);
        const bool plain = !strstr(whole.p, "#") && !setup.family && !setup.n_stop && !(setup.format->flags & PARSE_HARMONY);
        CHECK_MSG(!plain || str_is(buf_view(&whole), text.p ? text.p : ""), "%s: %s", text.p, whole.p);
        buf_free(&text), buf_free(&whole), buf_free(&cut);
    }
}

/* The start state: only the end of the prompt counts. */
static void test_parse_prompts(void) {
    const parse_family *family = parse_find_family("qwen3", STR(""));
    CHECK(parse_prompt_thinks(family, STR("<|im_start|>assistant\n<think>\n")) && parse_prompt_thinks(family, STR("<think>")));
    CHECK(!parse_prompt_thinks(family, STR("<think>\n\n</think>\n\n")) && !parse_prompt_thinks(family, STR("<think> is a tag<|im_end|>\n")));
    CHECK(!parse_prompt_thinks(family, STR("")) && !parse_prompt_thinks(NULL, STR("<think>")));
    const parse_setup setup = {.family = family, .format = parse_find_format("deepseek_v31", STR(""))};
    CHECK(parse_needs_token(&setup, STR("<think>")) && parse_needs_token(&setup, STR(DS_SEP)) && !parse_needs_token(&setup, STR("<|im_end|>")));
    CHECK(!parse_needs_token(&setup, STR("")));
    const parse_setup harmony = {.family = parse_find_family("openai_gptoss", STR(""))};
    const parse_setup answer = {.family = parse_find_family("hunyuan_a13b", STR(""))};
    CHECK(parse_needs_token(&answer, STR("</answer>")) && !parse_needs_token(&setup, STR("<answer>")));
    CHECK(parse_needs_token(&harmony, STR("<|start|>")) && parse_needs_token(&harmony, STR("<|message|>")) && !parse_needs_token(&harmony, STR("<|endoftext|>")));
    CHECK(!parse_prompt_thinks(harmony.family, STR("<|channel|>")));
}

/* The chat templates of models have the forms that they are known for. */
static void test_parse_templates(void) {
    static const struct {
        const char *file, *format, *family;
    } rows[] = {
        {"GLM-4.6.jinja", "glm45", "glm45"}, {"GLM-4.7-Flash.jinja", "glm47", "glm47"}, {"HuggingFaceTB-SmolLM3-3B.jinja", NULL, "qwen3"},
        {"Kimi-K2-Instruct.jinja", "kimi_k2", NULL}, {"Kimi-K2-Thinking.jinja", "kimi_k2", "kimi_k2"}, {"LFM2-8B-A1B.jinja", "lfm2", NULL},
        {"Mistral-Small-3.2-24B-Instruct-2506.jinja", "mistral", NULL}, {"NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja", "hermes", NULL},
        {"Qwen-QwQ-32B.jinja", "hermes", "qwen3"}, {"Qwen-Qwen2.5-7B-Instruct.jinja", "hermes", NULL}, {"Qwen-Qwen3-0.6B.jinja", "hermes", "qwen3"},
        {"Qwen3-Coder.jinja", "qwen3_coder", NULL}, {"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja", "deepseek_v3", "deepseek_r1"},
        {"deepseek-ai-DeepSeek-V3.1.jinja", "deepseek_v31", "deepseek_v3"}, {"deepseek-ai-DeepSeek-V3.2.jinja", "deepseek_v32", "deepseek_v3"},
        {"llama-cpp-deepseek-r1.jinja", "deepseek_v3", "deepseek_r1"}, {"meta-llama-Llama-3.1-8B-Instruct.jinja", "llama3_json", NULL},
        {"meta-llama-Llama-3.2-3B-Instruct.jinja", "llama3_json", NULL}, {"meta-llama-Llama-3.3-70B-Instruct.jinja", "llama3_json", NULL},
        {"ibm-granite-granite-3.3-2B-Instruct.jinja", "granite", "ernie45"}, {"mistralai-Ministral-3-14B-Reasoning-2512.jinja", "mistral", "mistral"},
        {"mistralai-Mistral-Nemo-Instruct-2407.jinja", "mistral", NULL}, {"unsloth-mistral-Devstral-Small-2507.jinja", "mistral", NULL},
        {"openai-gpt-oss-120b.jinja", "openai", "openai_gptoss"}, {"gemma-2-9b-it.json", NULL, NULL}, {"microsoft-Phi-3.5-mini-instruct.jinja", NULL, NULL}, {"fireworks-ai-llama-3-firefunction-v2.jinja", "phi4_mini_json", NULL},
        {"CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja", NULL, "cohere"}};
    for (int i = 0; i < COUNT(rows); i++) {
        char name[500];
        snprintf(name, sizeof name, "templates/%s", rows[i].file);
        const char *path = data_path(name);
        if (!path) {
            SKIP(1, "no public test data");
            continue;
        }
        const str text = read_copy(path);
        const parse_format *format = parse_find_format(NULL, text);
        const parse_family *family = parse_find_family(NULL, text);
        CHECK_MSG(rows[i].format ? format && parse_is_listed(format->names, rows[i].format) : !format, "%s: %s", rows[i].file, format ? format->names : "");
        CHECK_MSG(rows[i].family ? family && parse_is_listed(family->names, rows[i].family) : !family, "%s: %s", rows[i].file, family ? family->names : "");
        free((void *)text.p);
    }
}

/* A header that does not end is content, and the next header is read. */
static void test_parse_long_headers(void) {
    buf text = {0}, want = {0};
    buf_c(&text, "<|channel|>analysis");
    for (int i = 0; i < 300; i++) buf_char(&text, 'x');
    buf_str(&want, buf_view(&text)), buf_c(&want, "\na");
    buf_c(&text, "<|channel|>final<|message|>a");
    const parse_sample sample = {.format = "openai", .text = text.p, .want = want.p};
    parse_check(&sample);
    buf_free(&text), buf_free(&want);
}

/* The conversations of openai/harmony's own tests: reasoning, calls of tools, and what the tools said. Each answer is what follows
 * the last message of a user. test_tools.py has the other files. */
static void test_parse_harmony_suite(void) {
    static const struct {
        const char *file, *after, *want; /* after: where the answer begins; NULL: at the begin */
    } rows[] = {
        {"streamable_parser", NULL, "<r:User asks \"Who is the current US president?\""},
        {"streamable_parser", NULL, "Let's browse to confirm.><browser.search#:{\"query\": \"current US president July 2025\", \"topn\": 10, \"source\": \"news\"}>"},
        {"keep_analysis_between_finals", "3 + 5?<|end|><|start|>assistant", "<r:thinking 3+5>8"},
        {"keep_analysis_between_finals", "2 + 2?<|end|><|start|>assistant", "4"},
        {"preserve_cot", "2 + 2?<|end|><|start|>assistant", "<r:User asks a simple question: \"What is 2 + 2?\" The answer: 4.>2 + 2 equals 4."},
        {"dropping_cot_by_default", "2 + 2?<|end|><|start|>assistant", "2 + 2 equals 4."},
        {"does_not_drop_if_ongoing_analysis", "in SF?<|end|><|start|>assistant",
         "<r:User asks: “What is the weather in SF?” We need to use lookup_weather tool.><lookup_weather#:{\"location\": \"San Francisco\"}>"},
        {"tool_response_parsing", NULL, "{\"result\": \"https://openai.com/\"}"}};
    for (int i = 0; i < COUNT(rows); i++) {
        char name[200];
        snprintf(name, sizeof name, "suites/harmony/test_%s.txt", rows[i].file);
        const char *path = data_path(name);
        if (!path) {
            SKIP(1, "no public test data");
            continue;
        }
        const str text = read_copy(path);
        const ptrdiff_t at = rows[i].after ? str_find(text, str_c(rows[i].after), 0) : 0;
        CHECK(at >= 0);
        str answer = str_sub(text, (size_t)at + (rows[i].after ? strlen(rows[i].after) : 0), text.n);
        const ptrdiff_t end = str_find(answer, STR("<|start|>user"), 0);
        if (end >= 0) answer.n = (size_t)end;
        const parse_tool browser = {.name = STR("browser.search")};
        const parse_setup setup = {.format = parse_find_format("openai", STR("")), .tools = &browser, .n_tools = 1};
        buf whole = {0}, cut = {0};
        parse_in_pieces(&setup, answer, answer.n, 1, &whole);
        CHECK_MSG(str_find(buf_view(&whole), str_c(rows[i].want), 0) >= 0 && !strstr(whole.p, "<|"), "%s: %s", rows[i].file, whole.p);
        for (size_t n = 1; n < answer.n; n += 3) {
            parse_in_pieces(&setup, answer, n, n % 5 + 1, &cut);
            CHECK(str_eq(buf_view(&whole), buf_view(&cut)));
        }
        buf_free(&whole), buf_free(&cut), free((void *)text.p);
    }
}

/* ---- Structures ---- */

static const char parse_made_tools[] =
    "[{\"name\":\"f\",\"strict\":true,\"parameters\":{\"type\":\"object\",\"properties\":{\"s\":{\"type\":\"string\"},\"i\":{\"type\":\"integer\"},\"e\":{\"enum\":[\"x\",\"y<z\",\"</parameter>\",\"a</arg_value>\",\"</｜DSML｜parameter>\"]},"
    "\"o\":{\"$ref\":\"#/$defs/o\"},\"l\":{\"type\":\"array\",\"items\":{\"type\":\"number\"},\"maxItems\":3},\"m\":{\"type\":[\"string\",\"null\"],\"minLength\":2},"
    "\"b\":{\"type\":\"boolean\"}},\"required\":[\"s\",\"e\"],\"additionalProperties\":false,"
    "\"$defs\":{\"o\":{\"type\":\"object\",\"properties\":{\"b\":{\"type\":\"boolean\"},\"t\":{\"enum\":[\"</parameter>\",\"</arg_value>\",\"[\\\"</｜DSML｜parameter>\"]},\"n\":{\"type\":\"null\"}},\"additionalProperties\":false}}}},{\"name\":\"g\"}]";

/* Appends the texts of a pattern that a walk may write at once. */
static void parse_add_pieces(const char *pattern, str *pieces, int *n) {
    for (const char *at = pattern; at && *at; at += strcspn(at, "%")) {
        while (*at == '%') at += 2;
        const size_t bytes = strcspn(at, "%");
        if (bytes && *n < 30) pieces[(*n)++] = (str){at, bytes};
    }
}

/* Writes a random text of a structure. Returns false if it did not come to an end. */
static bool parse_walk(toka_constraint *c, const parse_format *format, uint64_t *seed, buf *out) {
    static const char letters[] = "ax1 \n\"\"\"{}}[]],:.-<>/()='tn";
    str pieces[40] = {STR("true"), STR("null"), STR("True"), STR("None"), STR("functools")};
    int n = 5;
    parse_add_pieces(format->call, pieces, &n), parse_add_pieces(format->param, pieces, &n);
    parse_add_pieces(format->open, pieces, &n), parse_add_pieces(format->close, pieces, &n);
    con_machine *m = &c->machine;
    buf_clear(out);
    int node = con_begin(m, c->grammar.root);
    for (int step = 0; step < 6000 && m->nodes[node].n; step++) {
        if (con_accepts(m, node) && rnd(seed) % 8 == 0) return true;
        char any = 0;
        const uint64_t kind = rnd(seed) % 4;
        str piece = kind == 0 ? pieces[rnd(seed) % (unsigned)n] : kind == 1 ? (str){&any, 1} : (str){&letters[rnd(seed) % (sizeof letters - 1)], 1};
        int n_next = 0;
        for (int byte = 0; byte < 256; byte++) /* any one that is allowed; where all are, no part of a character */
            if (con_step(m, node, byte) != CON_DEAD && (byte < 128 || n_next < 20) && rnd(seed) % (unsigned)++n_next == 0) any = (char)byte;
        if (n_next == 1) piece = (str){&any, 1};
        const int next = con_advance(m, node, piece);
        if (next == CON_DEAD) continue;
        buf_str(out, piece);
        node = next;
    }
    return con_accepts(m, node);
}

/* Is this JSON that the schema allows, with any white space? */
static bool parse_reads(toka_constraint *schema, str text) {
    buf bare = {0};
    bool quoted = false;
    for (size_t i = 0; i < text.n; i++) {
        if (text.p[i] == '"') quoted = !quoted;
        if (quoted || !parse_is_space(text.p[i])) buf_char(&bare, text.p[i]);
        if (text.p[i] == '\\' && i + 1 < text.n) buf_char(&bare, text.p[++i]);
    }
    const bool reads = con_reads(schema, buf_view(&bare));
    buf_free(&bare);
    return reads;
}

/* What a structure allows is read as calls with valid arguments. */
static void parse_check_walk(const parse_demand *demand, toka_constraint *schemas[2], str text) {
    parser p;
    parse_event event;
    int n_calls = 0, n_content = 0, which = 0;
    parser_init(&p, demand->setup);
    parser_feed(&p, text);
    parser_end(&p);
    for (str events = buf_view(&p.events); parse_next_event(&events, &event);) {
        n_content += event.kind == PARSE_CONTENT;
        if (demand->setup->calls_or_content && event.kind == PARSE_CONTENT) CHECK_MSG(event.text.p[0] == '[', "%.*s", STRF(text));
        n_calls += event.kind == PARSE_CALL;
        if (event.kind == PARSE_CALL) which = str_is(event.text, "g");
        if (event.kind == PARSE_ARGUMENTS && (demand->must_call || !which))
            CHECK_MSG(parse_reads(schemas[which], event.text), "%s: '%.*s': '%.*s'", demand->setup->format->names, STRF(text), STRF(event.text));
    }
    if (demand->setup->calls_or_content) CHECK_MSG(!n_calls != !n_content, "%s: '%.*s'", demand->setup->format->names, STRF(text));
    if (demand->must_call)
        CHECK_MSG(n_calls && !n_content && (n_calls == 1 || !demand->setup->one_call), "%s: '%.*s': %d calls", demand->setup->format->names, STRF(text), n_calls);
    parser_free(&p);
}

static void test_parse_structures(void) {
    toka_err e;
    arena memory = {0};
    uint64_t seed = 11;
    const json *tools = json_parse(&memory, str_c(parse_made_tools), json_trusted, &e), *functions[2] = {json_at(tools, 0), json_at(tools, 1)};
    buf text = {0}, wrapped = {0}, schema = {0};
    json_put_value(&schema, json_get(functions[0], "parameters"));
    toka_constraint *schemas[2] = {con_make(TOKA_GRAMMAR_JSON_SCHEMA, schema.p, NULL, &con_no_tokens, &e),
                                   con_make(TOKA_GRAMMAR_JSON_SCHEMA, "{\"type\":\"object\",\"additionalProperties\":false}", NULL, &con_no_tokens, &e)};
    buf_c(&wrapped, "[");
    for (int i = 0; i < 2; i++) buf_c(&wrapped, i ? "," : ""), buf_c(&wrapped, "{\"function\":"), json_put_value(&wrapped, functions[i]), buf_c(&wrapped, "}");
    buf_c(&wrapped, "]");
    parse_tool *list;
    const int n_tools = parse_tools_init(&memory, json_parse(&memory, buf_view(&wrapped), json_trusted, &e), &list);
    for (int i = 0; i < COUNT(parse_formats) * 6; i++) {
        const parse_format *format = &parse_formats[i / 6];
        const parse_family *last = &parse_families[COUNT(parse_families) - 1]; /* two before it: with texts around the content */
        const parse_setup setup = {.format = format, .tools = list, .n_tools = n_tools, .one_call = i % 2, .family = i % 6 == 4 ? last : i % 6 == 3 || i % 6 == 1 ? last - 2 : NULL,
                                   .calls_or_content = i % 6 == 3, .valid_calls = true};
        const parse_demand demand = {.setup = &setup, .functions = functions, .n_functions = 2, .may_call = true, .must_call = i % 6 < 2 || i % 6 == 4,
                                     .content = i % 6 == 3 ? STR("{\"type\":\"json_schema\",\"json_schema\":{\"type\":\"array\"}}") : STR("")};
        buf_clear(&text);
        parse_put_answer(&demand, &text);
        toka_constraint *c = con_make(TOKA_GRAMMAR_STRUCTURE, text.p, NULL, &con_no_tokens, &e);
        CHECK_MSG(c, "%s: %s: %s", format->names, e.msg, text.p);
        const bool around = c && con_reads(c, STR("<think>x</think>\n<answer>\n[1]\n</answer>"));
        CHECK(i % 6 != 3 || around == !(format->flags & PARSE_HARMONY));
        int n_ended = 0;
        for (int walk = 0; c && walk < 12; walk++) {
            if (!parse_walk(c, format, &seed, &text)) continue;
            parse_check_walk(&demand, schemas, buf_view(&text));
            n_ended++;
        }
        CHECK_MSG(n_ended > 0, "%s: only %d walks ended", format->names, n_ended);
        con_del(c);
    }
    con_del(schemas[0]), con_del(schemas[1]);
    buf_free(&text), buf_free(&wrapped), buf_free(&schema);
    arena_free(&memory);
}

/* The fuzzer (fuzz_parse.c) starts from texts and structures of every form, and of every family of reasoning. */
static void test_parse_corpus(void) {
    int texts[COUNT(parse_formats)] = {0}, structures[COUNT(parse_formats)] = {0}, families[COUNT(parse_families)] = {0};
    DIR *folder = opendir("test/corpus/parse");
    CHECK(folder != NULL);
    if (!folder) return;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        char path[400];
        unsigned char head[3];
        snprintf(path, sizeof path, "test/corpus/parse/%s", entry->d_name);
        FILE *f = fopen(path, "rb");
        if (entry->d_name[0] != '.' && f && fread(head, 1, 3, f) == 3) {
            (head[2] & 128 ? structures : texts)[head[0] % COUNT(parse_formats)]++;
            if ((head[1] & 63) < COUNT(parse_families)) families[head[1] & 63]++;
        }
        if (f) fclose(f);
    }
    closedir(folder);
    for (int i = 0; i < COUNT(parse_formats); i++) CHECK_MSG(texts[i] && structures[i], "%s", parse_formats[i].names);
    for (int i = 0; i < COUNT(parse_families); i++) CHECK_MSG(families[i], "%s", parse_families[i].names);
}

static const struct test parse_tests[] = {
    {"parse: the fuzzer's texts have every form", test_parse_corpus},
    {"parse: headers that do not end", test_parse_long_headers},
    {"parse: conversations of harmony's tests", test_parse_harmony_suite},
    {"parse: samples of every form", test_parse_samples},
    {"parse: marks that are tokens", test_parse_marks},
    {"parse: ids with numbers", test_parse_counted_ids},
    {"parse: names of forms", test_parse_names},
    {"parse: types of a hostile schema", test_parse_hostile_types},
    {"parse: calls or content", test_parse_calls_or_content},
    {"parse: long calls come while they are written", test_parse_long_calls},
    {"parse: stop strings count in the content", test_parse_stops},
    {"parse: random texts", test_parse_random},
    {"parse: the end of the prompt", test_parse_prompts},
    {"parse: chat templates of models", test_parse_templates},
    {"parse: what a structure allows is read as valid calls", test_parse_structures},
    {NULL, NULL}};
