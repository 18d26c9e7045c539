/* Tests of chapters 23 to 25: which texts a constraint accepts, its masks, and requests with
 * constraints. test_constraint.py has the comparisons with Python's re and jsonschema. */

/* Compiles a grammar for a vocabulary; a constraint or NULL. */
static toka_constraint *con_make(int kind, const char *text, const tok *tokenizer, const con_vocab *vocab, toka_err *e) {
    toka_constraint *c = NULL;
    const toka_grammar g = {.kind = kind, .text = text, .text_bytes = strlen(text)};
    *e = (toka_err){0};
    con_new(&c, &g, tokenizer, vocab, e);
    return c;
}
static bool con_reads(toka_constraint *c, str text) {
    con_machine *m = &c->machine;
    return con_accepts(m, con_advance(m, con_begin(m, c->grammar.root), text));
}

enum { JS = TOKA_GRAMMAR_JSON_SCHEMA, JO = TOKA_GRAMMAR_JSON_OBJECT, CH = TOKA_GRAMMAR_CHOICE, RE = TOKA_GRAMMAR_REGEX, BN = TOKA_GRAMMAR_GBNF,
       ST = TOKA_GRAMMAR_STRUCTURE };

/* yes and no: texts with | between them */
#define CON_A50 "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
#define CON_A100 CON_A50 CON_A50
static const struct con_case {
    int kind;
    const char *grammar, *yes, *no;
} con_cases[] = {
    {RE, "a|bc*", "a|b|bccc", "ac||aa"},
    {RE, "[0-9]{2,3}x?", "12|123x", "1|1234"},
    {RE, "(ab){2,}", "abab|ababab", "ab|aba"},
    {RE, "a{0}b{,2}", "|b|bb", "a|bbb"},
    {RE, "^\\u00e9+$", "\xC3\xA9|\xC3\xA9\xC3\xA9", "e|\xC3"},
    {RE, "(?i)a[b-d]", "AB|aD", "ae"},
    {RE, "[^a-z\\d]", "A|\xE2\x82\xAC|\xF0\x9F\x98\x80", "a|5|AA|\xC3"},
    {RE, "\\w+\\s\\S", "ab_1 x", "a-b x|ab  "},
    {RE, ".*", "|x\xC3\xA9", "a\nb"},
    {RE, "(?s).", "\n", "\n\n"},
    {RE, "(^a$)|^b|c$", "a|b|c", "ab"},
    {RE, "(?:a|(?P<x>b))(?<y>c)", "ac|bc", "a|abc"},
    {RE, "x{y}", "x{y}", "xy"},
    {RE, "(a?){3}(a*)*", "|a|aaaa", "b"},
    /* alternatives that begin alike: a quantifier, a group, a class or nothing behind the same characters */
    {RE, "(abc|abd|ab|a(b|x)e|abd*f|a[bc]g|ab{2}|)z", "abcz|abdz|abz|abez|axez|abfz|abddfz|acgz|abgz|abbz|z", "az|abddz|axz|ace|abcdz|abczz|abdgz"},
    {RE, "(?i)(foo|Fob|FO1|fo\\.)+", "foo|FOBfo1|fo.FO.", "fo|fa|f01|foo2"},
    {RE, "(ab|ac|a)(ab|ac|a)d", "abacd|aad|acad", "abd|ad|aabacd"},
    {BN, "root ::= \"[\" root{0,2} \"]\"", "[]|[[]]|[[][]]|[[[]]]", "[[][][]]|[|]"},
    {BN, "root ::= e\ne ::= t ((\"+\"\n| \"-\") t)* # sum\nt ::= [0-9]+ | \"(\" e \")\"\n", "1+2|(1-2)+3|((2))", "1+|(1|()"},
    {BN, "root ::=\n  \"a\" b?\n  | \"c\"\nb ::= \"\\x41\\n\\\"\" [^\\n\\]]", "a|aA\n\"x|c", "aA|aA\n\"]|b"},
    {BN, "root ::= \"a\" root | \"b\"", "b|ab|aaaaaaaaaab", "a|ba"},
    /* left recursion: of one rule, of two, of a rule that may match nothing, behind an option, and beside calls that are not on the left */
    {BN, "root ::= root \"a\" | \"b\"", "b|ba|baaa", "|a|ab|bb"},
    {BN, "root ::= x \"1\" | \"2\"\nx ::= root \"3\" | x \"4\" | \"5\"", "2|51|231|5441|23441|51341", "|1|21|5|24|2351"},
    {BN, "root ::= root \"a\" | ", "|a|aa", "b|ab"},
    {BN, "root ::= a\na ::= \"x\"? root \"z\" | \"y\"", "y|yz|xyz|xxyzz|xyzz|yzz", "|x|xy|z|xxyz"},
    {BN, "root ::= root \"+\" root | \"(\" root \")\" | [0-9]", "1|1+2|1+(2+3)+4|((1))", "+1|1+|(1|1+)"},
    {BN, "root ::= a | b\na ::= a \"x\" | b \"y\"\nb ::= b \"z\" | \"k\" a \";\"\n  | \"m\"", "m|mz|my|mzyx|mzyxx|kmy;y|kmzyx;zy", "x|y|mx|mzx|myz|km;y"},
    {BN, "root ::= root{2} \"a\" | [xy]{0,2} root \"z\" | \"b\"", "b|bba|bbaba|bbbaa|bbabaz|xybz|yxbzz", "ba|bbba|xyb|bb"},
    /* left recursion behind what may match nothing: an option, itself, a rule of a Lark grammar, a root that may match nothing, one that only calls itself */
    {BN, "root ::= n root \"a\" | \"b\"\nn ::= \"x\"?", "b|ba|xba|xbaa|xxbaa|baaa", "|x|xb|xxba|a|bx"},
    {BN, "root ::= n n root \"a\" | m\nn ::= root{0,2} \"y\"?\nm ::= \"b\"*", "|b|bb|a|ba|yba|bbba|yya|yyyyaa", "c|y|by|bay|ab|yyya"},
    {BN, "root ::= x root | x root \"c\" | \"d\"\nx ::= (y | \"e\")*\ny ::= x", "d|dc|ed|eedc|dcc|edcc", "e|c|ec|cd"},
    {BN, "start: n start \"+\" W | W\nn: (\"-\" |)\nW: /[a-z]+/\n%ignore \" \"", "a|a + b|- a+b|-  -a +b +c|a+b+c", "-a|a b|+a|a +|--a+b"},
    {BN, "root ::= root? root | \"q\" root \"r\" |", "|qr|qqrr|qrqr|qqrqrr", "q|r|rq|qqr"},
    /* Lark: trees have no effect; a name and a text beside each other; priorities, aliases, comments */
    {BN, "// a comment\nstart: _a b?  # another\n ?b: \"b\" -> x\n  | C -> y\n!_a.2: \"a\"\nC: \"c\"i", "a|ab|ac|aC", "b|aa|aB|abc"},
    {BN, "start: \"a\"~2 \"b\"~1..2 (\"c\" | [\"d\"])+ /e{2}/ \"f\"{0,1}", "aabee|aabbcdceef|aabdee", "abee|aabbbee|aabef|aabeeff"},
    {BN, "start: \"k\"..\"m\" \"\\x41\\n\\\"\"i R\nR: \"0\" .. \"3\" | \"x\"", "kA\n\"0|la\n\"x", "jA\n\"0|KA\n\"0|kA\n\"4"},
    {BN, "?start: sum\n?sum: product | sum \"+\" product -> add\n?product: atom | product \"*\" atom -> mul\n?atom: NUMBER -> number | \"-\" atom -> neg | \"(\" sum \")\"\n"
         "%import common.NUMBER\n%import common.WS_INLINE -> SPACE\n%ignore SPACE", "1|1 + 2.5e3*-( 3 )|1+ 2|1 * 2", "+|1+|(1|1 2|1+\n2| 1|1 ()"},
    /* a lexeme is as long as possible, though then the rule does not go on */
    {BN, "start: A \"b\"\nA: /[ab]+/ | \"c\"", "cb", "ab|abb|c"},
    {BN, "start: N \"FROM\" N\nN: /[a-zA-Z]+/\n%ignore \" \"", "x FROM t|x FROMt|x  FROM  t", "xFROM t|x FROM t | x FROM t"},
    {BN, "start: \"if\" N \";\" | N \".\"\nN: /[a-z]+/\n%ignore / +/", "if x;|ifx.|if .|x.", "ifx;|if x.|if;"},
    /* ignored text stands between lexemes, and at the end only if another may follow */
    {BN, "start: \"a\"+\n%ignore \" \"\n%ignore /#[^;]*;/", "a|aa|a a|a |a #x y; # ; a", " a|#;a|a#"},
    {BN, "start: \"a\" \"b\"\n%ignore \" \"", "ab|a  b", "ab | ab|a bb"},
    {BN, "start: \"x\" N? \"y\"\nN: /a*/\n%ignore \" \"", "xy|x y|xaay|x a y", "xa ay|x"},
    {BN, "start: a | \nA: \"x\"\na: A a", "", "x|xx"},
    {BN, "start: A B\nA: B (\"c\" | B)~2\nB: \"b\" | D\nD: \"d\"", "bccb|bbdd|dddd", "bcb|cccb|bccc"},
    {BN, "%llguidance {}\n%import common (INT, CNAME, WORD, LETTER, DIGIT, HEXDIGIT)\n%import common.NEWLINE\nstart: (CNAME \"=\" INT NEWLINE)+ LETTER \"-\" DIGIT \"-\" HEXDIGIT \"-\" WORD", "a_1=23\nb=4\r\nx-1-f-ab", "1a=2\n|a=2\nx-1-f-a1|a=2\nx-12-f-a"},
    {BN, "start: X\n%import common.ESCAPED_STRING -> X", "\"\"|\"a\\\"b\\\\\"|\"\xC3\xA9\"", "\"|\"a\n\"|\"a\"b\"|\"\\\""},
    {BN, "start: (SIGNED_NUMBER | FLOAT \"f\" | SIGNED_INT \"i\" | DECIMAL \"d\") \";\" C_COMMENT? SH_COMMENT? SQL_COMMENT?\n%import common (SIGNED_NUMBER, FLOAT, SIGNED_INT, DECIMAL, C_COMMENT, SH_COMMENT)\n%import common.SQL_COMMENT",
     "-1.5e+3;|7;|1e5f;|-3i;|.5d;/* * **/|1.;#x|+1;/**/#/*|1;--", ";|e5;|1f;|-.5d;|1;/*/|.;"},
    {ST, "{\"type\":\"sequence\",\"elements\":[{\"type\":\"const_string\",\"value\":\"<\"},{\"type\":\"grammar\",\"grammar\":\"start: A \\\"b\\\"\\nA: /a+/\\n%ignore \\\" \\\"\"},"
         "{\"type\":\"const_string\",\"value\":\" >\"}]}", "<aab >|<a b >", "< ab >|<ab>|<ab  >"},
    {CH, "[\"yes\",\"no\",\"n\\u00f6\"]", "yes|no|n\xC3\xB6", "n|ye|noo|n\xC3"},
    {JO, "", "{}|{\"a\": 1}|{\"a\":[1,{\"b\":null}],\n  \"c\":\"\\u00e9\\n\"}", "[1]|{\"a\":1,}|{a:1}| {}|{} |{\"a\":\"\\ud800\"}|{\"a\":01}|{  }"},
    {JS, "true", "1|-0.5e+3|\"\"|[]|{}|null|true", "|nul|+1|.5|1.|[1|'a'"},
    {JS, "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\"},\"b\":{\"type\":\"integer\"}},\"required\":[\"b\"],\"additionalProperties\":false}",
     "{\"b\":1}|{\"a\": \"x\", \"b\": -7}", "{}|{\"a\":\"x\"}|{\"b\":1,\"a\":\"x\"}|{\"b\":1,\"c\":2}|{\"b\":1.5}|{\"b\":1,}|{,\"b\":1}"},
    {JS, "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"null\"}},\"required\":[\"z\"]}", "{\"z\":1}|{\"a\":null,\"z\":[],\"x\":1}",
     "{\"a\":null}|{\"z\":1,\"a\":1}"},
    {JS, "{\"type\":\"object\",\"properties\":{\"ab\":{\"type\":\"null\"}},\"additionalProperties\":{\"type\":\"integer\"}}",
     "{\"ab\":null,\"a\":1,\"abc\":2,\"\":3}", "{\"ab\":1}|{\"a\":null}|{\"a\":1,\"ab\":1}"},
    {JS, "{\"type\":\"object\",\"patternProperties\":{\"^x\":{\"type\":\"integer\"},\"y$\":{\"maximum\":5}},\"additionalProperties\":false}",
     "{\"x\":9}|{\"xy\":5}|{\"ay\":\"s\"}", "{\"xy\":6}|{\"xy\":\"s\"}|{\"x\":\"s\"}|{\"a\":1}"},
    {JS, "{\"type\":\"object\",\"minProperties\":2,\"maxProperties\":3,\"properties\":{\"a\":{},\"b\":{}}}",
     "{\"a\":1,\"b\":2}|{\"b\":1,\"x\":1}|{\"b\":1,\"x\":1,\"x\":2}", "{}|{\"a\":1}|{\"x\":1,\"x\":2}|{\"a\":1,\"b\":1,\"c\":1,\"d\":1}"},
    {JS, "{\"type\":\"array\",\"items\":{\"type\":\"boolean\"},\"minItems\":1,\"maxItems\":3}", "[true]|[true, false,true]", "[]|[1]|[true,true,true,true]"},
    {JS, "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"null\"},{\"type\":\"string\"}],\"items\":{\"type\":\"integer\"},\"minItems\":1}",
     "[null]|[null,\"\"]|[null,\"\",1,2]", "[]|[1]|[null,1]|[null,\"\",\"\"]"},
    {JS, "{\"type\":\"array\",\"items\":[{\"type\":\"null\"}],\"additionalItems\":false}", "[]|[null]", "[null,null]"},
    {JS, "{\"type\":\"array\",\"items\":false}", "[]", "[1]"},
    {JS, "{\"type\":\"array\",\"minItems\":400,\"maxItems\":400,\"items\":{\"const\":1}}", "", "[1]|[]"},
    {JS, "{\"type\":\"integer\",\"minimum\":-12,\"exclusiveMaximum\":105}", "-12|-1|0|9|99|104", "-13|105|-0|1.0|007|1e1"},
    {JS, "{\"type\":\"integer\",\"minimum\":7}", "7|10|99999999999999999999", "6|-7|0"},
    {JS, "{\"type\":\"integer\",\"maximum\":-7}", "-7|-10|-123456", "-6|7|0"},
    {JS, "{\"type\":\"number\",\"minimum\":-1.5,\"exclusiveMaximum\":10.25}", "-1.5|-1.499|0|-0.5|10|10.2499|9.99|0.0", "-1.51|-2|10.25|10.250|10.3|11|1e0"},
    {JS, "{\"type\":\"number\",\"exclusiveMinimum\":0}", "0.001|1|10.0", "0|0.0|-1"},
    {JS, "{\"type\":\"integer\",\"multipleOf\":7}", "0|7|-14|777", "1|-1|8"},
    {JS, "{\"type\":\"number\",\"multipleOf\":0.25,\"maximum\":10}", "0|0.25|-3.75|9.5|10|1.0", "0.1|10.25|0.255"},
    {JS, "{\"type\":\"string\",\"minLength\":2,\"maxLength\":3}", "\"ab\"|\"\xC3\xA9\xF0\x9F\x98\x80\"|\"\\n\\\"x\"|\"\\ud83d\\ude00a\"", "\"a\"|\"abcd\"|\"\\u00e9\""},
    {JS, "{\"type\":\"string\",\"pattern\":\"^a.*z$\",\"maxLength\":4}", "\"az\"|\"abcz\"|\"a\\\"z\"|\"a\xC3\xA9z\"", "\"abccz\"|\"b\"|\"a\\u0062z\"|\"a\\nz\""},
    {JS, "{\"type\":\"string\",\"pattern\":\"b\"}", "\"b\"|\"abc\"|\"\\nb\"", "\"\"|\"a\""},
    {JS, "{\"type\":\"string\",\"format\":\"date-time\"}", "\"2024-02-29T12:00:00Z\"|\"1999-12-31T23:59:59.5+01:00\"", "\"2023-02-29T12:00:00Z\"|\"2024-13-01T00:00:00Z\"|\"x\""},
    {JS, "{\"type\":\"string\",\"format\":\"ipv4\"}", "\"1.22.255.0\"", "\"1.2.3\"|\"256.1.1.1\"|\"01.1.1.1\""},
    {JS, "{\"type\":\"string\",\"format\":\"a format that nobody knows\"}", "\"x\"", "1"},
    {JS, "{\"enum\":[\"a\",1,null,{\"x\":[1,\"y\"]},2.5]}", "\"a\"|1|null|{\"x\": [1, \"y\"]}|2.5", "\"b\"|2|{}|\"\""},
    {JS, "{\"enum\":[\"a\",\"abc\",3,9],\"type\":[\"string\",\"integer\"],\"minLength\":2,\"maximum\":5}", "\"abc\"|3", "\"a\"|9"},
    /* values that begin alike, that are the beginning of another, with escapes, twice */
    {JS, "{\"enum\":[\"\",\"a\",\"ab\",\"a\\n\",\"a\\n\",\"a\\u0001\\\"\",\"\\u20ac\",\"\\u20ad\",1,12,-1,true,[],[1],[1,2],{\"a\":1},{\"a\":12}]}",
     "\"\"|\"a\"|\"ab\"|\"a\\n\"|\"a\\u000A\"|\"a\\u0001\\\"\"|\"\xE2\x82\xAC\"|\"\xE2\x82\xAD\"|1|12|-1|true|[]|[ 1]|[1, 2]|{\"a\":1}|{\"a\" : 12}",
     "\"b\"|\"abc\"|\"a\\\"|\"\xE2\x82\xAE\"|2|121|-12|tru|[12]|[1,2,3]|{\"a\":2}|{\"a\":1,\"a\":1}|{}"},
    {JS, "{\"const\":{\"a\":1}}", "{\"a\":1}|{ \"a\": 1 }", "{}|{\"a\":2}"},
    {JS, "{\"anyOf\":[{\"type\":\"null\"},{\"type\":\"string\",\"maxLength\":1}]}", "null|\"a\"", "\"ab\"|1"},
    {JS, "{\"type\":[\"integer\",\"null\"],\"minimum\":3}", "null|3", "2|\"a\""},
    {JS, "{\"oneOf\":[{\"type\":\"object\",\"properties\":{\"k\":{\"const\":\"a\"},\"v\":{\"type\":\"integer\"}},\"required\":[\"k\"]},"
         "{\"type\":\"object\",\"properties\":{\"k\":{\"const\":\"b\"},\"v\":{\"type\":\"string\"}},\"required\":[\"k\"]}]}",
     "{\"k\":\"a\",\"v\":1}|{\"k\":\"b\",\"v\":\"x\"}", "{\"k\":\"a\",\"v\":\"x\"}|{\"k\":\"c\"}|{}"},
    {JS, "{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}}},{\"properties\":{\"a\":{\"minimum\":3},\"b\":{\"type\":\"null\"}},\"required\":[\"a\"]}]}",
     "{\"a\":3}|{\"a\":4,\"b\":null}", "{\"a\":2}|{}|{\"a\":3,\"b\":1}"},
    /* members come in the order in which the schema mentions them */
    {JS, "{\"$defs\":{\"a\":{\"properties\":{\"a\":{}},\"type\":\"object\"}},\"$ref\":\"#/$defs/a\",\"properties\":{\"o\":{}}}", "{\"a\":1,\"o\":1}", "{\"o\":1,\"a\":1}"},
    {JS, "{\"$defs\":{\"a\":{\"properties\":{\"a\":{}},\"type\":\"object\"}},\"properties\":{\"o\":{}},\"$ref\":\"#/$defs/a\"}", "{\"o\":1,\"a\":1}", "{\"a\":1,\"o\":1}"},
    {JS, "{\"$defs\":{\"a\":{\"properties\":{\"a\":{}},\"type\":\"object\"}},\"allOf\":[{\"$ref\":\"#/$defs/a\"}],\"properties\":{\"o\":{}}}", "{\"a\":1,\"o\":1}", "{\"o\":1,\"a\":1}"},
    {JS, "{\"$defs\":{\"a\":{\"properties\":{\"a\":{}},\"type\":\"object\"}},\"properties\":{\"o\":{}},\"allOf\":[{\"$ref\":\"#/$defs/a\"}]}", "{\"o\":1,\"a\":1}", "{\"a\":1,\"o\":1}"},
    {JS, "{\"$defs\":{\"a\":{\"properties\":{\"a\":{}},\"type\":\"object\"}},\"anyOf\":[{\"$ref\":\"#/$defs/a\"}],\"properties\":{\"o\":{}}}", "{\"a\":1,\"o\":1}", "{\"o\":1,\"a\":1}"},
    {JS, "{\"$defs\":{\"a\":{\"properties\":{\"a\":{}},\"type\":\"object\"}},\"properties\":{\"o\":{}},\"anyOf\":[{\"$ref\":\"#/$defs/a\"}]}", "{\"o\":1,\"a\":1}", "{\"a\":1,\"o\":1}"},
    {JS, "{\"$defs\":{\"a\":{\"properties\":{\"a\":{}},\"type\":\"object\"}},\"oneOf\":[{\"$ref\":\"#/$defs/a\"}],\"properties\":{\"o\":{}}}", "{\"a\":1,\"o\":1}", "{\"o\":1,\"a\":1}"},
    {JS, "{\"$defs\":{\"a\":{\"properties\":{\"a\":{}},\"type\":\"object\"}},\"properties\":{\"o\":{}},\"oneOf\":[{\"$ref\":\"#/$defs/a\"}]}", "{\"o\":1,\"a\":1}", "{\"a\":1,\"o\":1}"},
    {JS, "{\"additionalProperties\":false,\"anyOf\":[{\"properties\":{\"a\":{}},\"type\":\"object\"}],\"properties\":{\"o\":{},\"a\":{}}}", "{\"o\":1,\"a\":1}", "{\"a\":1,\"o\":1}"},
    {JS, "{\"allOf\":[{\"properties\":{\"a\":{}}},{\"anyOf\":[{\"properties\":{\"b\":{}}}]},{\"properties\":{\"c\":{}}}],\"type\":\"object\"}", "{\"a\":1,\"b\":1,\"c\":1}", "{\"a\":1,\"c\":1,\"b\":1}"},
    {JS, "{\"required\":[\"o\"],\"anyOf\":[{\"required\":[\"a\"]}],\"type\":\"object\"}", "{\"o\":1,\"a\":1}", "{\"a\":1,\"o\":1}"},
    {JS, "{\"$defs\":{\"n\":{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"integer\"},\"n\":{\"anyOf\":[{\"$ref\":\"#/$defs/n\"},{\"type\":\"null\"}]}},"
         "\"required\":[\"v\"],\"additionalProperties\":false}},\"$ref\":\"#/$defs/n\"}",
     "{\"v\":1}|{\"v\":1,\"n\":{\"v\":2,\"n\":null}}", "{\"n\":null}|{\"v\":1,\"n\":{}}|{\"v\":1,\"n\":3}"},
    {JS, "{\"$defs\":{\"s\":{\"type\":\"string\"}},\"type\":\"array\",\"items\":{\"$ref\":\"#/$defs/s\",\"maxLength\":1}}", "[]|[\"a\",\"\"]", "[\"ab\"]|[1]"},
    {JS, "{\"definitions\":{\"a/b~c d\":{\"type\":\"null\"}},\"$ref\":\"#/definitions/a~1b~0c%20d\"}", "null", "1"},
    /* percent signs are decoded before the pointer is split; names may be empty */
    {JS, "{\"$defs\":{\"a/b\":{\"type\":\"null\"},\"~1\":{\"\":[1,{\"type\":\"null\"}]}},\"anyOf\":[{\"$ref\":\"#%2F$defs/a%7E1b\"},{\"$ref\":\"#/%24defs/~01//1\"}]}", "null", "1|true"},
    {JS, "{\"$defs\":{\"\":{\"type\":\"null\"}},\"$ref\":\"#/$defs/\"}", "null", "1"},
    /* a $ref starts from the innermost schema with an $id (draft 4: id); what is not there is looked up from the root */
    {JS, "{\"$ref\":\"#/$defs/a\",\"$defs\":{\"a\":{\"$id\":\"http://x/a\",\"$defs\":{\"n\":{\"const\":1}},\"properties\":{\"v\":{\"$ref\":\"#/$defs/n\"}}},\"n\":{\"const\":2}}}", "{\"v\":1}", "{\"v\":2}"},
    {JS, "{\"$ref\":\"#/$defs/a\",\"$defs\":{\"a\":{\"$id\":\"http://x/a\",\"properties\":{\"v\":{\"$ref\":\"#/$defs/n\"}}},\"n\":{\"const\":2}}}", "{\"v\":2}", "{\"v\":1}"},
    {JS, "{\"$ref\":\"#/$defs/a\",\"$defs\":{\"a\":{\"id\":\"http://x/a\",\"$defs\":{\"n\":{\"const\":1}},\"properties\":{\"v\":{\"$ref\":\"#/$defs/n\"}}},\"n\":{\"const\":2}}}", "{\"v\":2}", "{\"v\":1}"},
    {JS, "{\"$schema\":\"http://json-schema.org/draft-04/schema#\",\"$ref\":\"#/$defs/a\",\"$defs\":{\"a\":{\"id\":\"http://x/a\",\"$defs\":{\"n\":{\"enum\":[1]}},\"properties\":{\"v\":{\"$ref\":\"#/$defs/n\"}}},\"n\":{\"enum\":[2]}}}", "{\"v\":1}", "{\"v\":2}"},
    {JS, "{\"$ref\":\"#/$defs/a\",\"$defs\":{\"a\":{\"$id\":\"http://x/a\",\"$defs\":{\"n\":{\"const\":\"q\"}},\"if\":{\"type\":\"string\"},\"then\":{\"$ref\":\"#/$defs/n\"},\"else\":true},\"n\":{\"const\":\"z\"}}}", "\"q\"|1", "\"z\""},
    {JS, "{\"properties\":{\"t\":{\"$id\":\"#t\",\"properties\":{\"k\":{\"$ref\":\"#\"},\"n\":{\"const\":1}}}}}", "{\"t\":{\"k\":{\"n\":2}}}", "{\"t\":{\"n\":2}}"},
    {JS, "{\"properties\":{\"t\":{\"$id\":\"http://x/t\",\"properties\":{\"k\":{\"$ref\":\"#\"},\"n\":{\"const\":1}}}}}", "{\"t\":{\"k\":{\"n\":1}}}", "{\"t\":{\"k\":{\"n\":2}}}"},
    {JS, "{\"properties\":{\"\x7F\":{}},\"patternProperties\":{\"^\x7F$\":{\"type\":\"integer\"}}}", "{\"\x7F\":1}", "{\"\x7F\":\"a\"}"}, /* no escape */
    {JS, "{\"not\":{\"type\":[\"object\",\"number\"]}}", "null|\"\"|[]", "{}|1|1.5"},
    {JS, "{\"type\":\"string\",\"not\":{\"enum\":[\"a\",\"b\\n\"]}}", "\"\"|\"ab\"|\"b\"", "\"a\"|\"b\\n\"|1"},
    {JS, "{\"type\":\"string\",\"maxLength\":3,\"not\":{\"pattern\":\"b\"}}", "\"\"|\"aca\"", "\"b\"|\"abc\"|\"aaaa\""},
    {JS, "{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{}},\"not\":{\"required\":[\"a\",\"b\"]}}", "{}|{\"a\":1}|{\"b\":1,\"x\":1}", "{\"a\":1,\"b\":1}"},
    {JS, "{\"type\":\"integer\",\"oneOf\":[{\"minimum\":3},{\"maximum\":5}]}", "2|6|-9", "3|4|5"},
    {JS, "{\"type\":\"object\",\"oneOf\":[{\"required\":[\"a\"]},{\"required\":[\"b\"]}],\"properties\":{\"a\":{},\"b\":{}}}", "{\"a\":1}|{\"b\":1}", "{}|{\"a\":1,\"b\":1}"},
    {JS, "{\"type\":\"object\",\"properties\":{\"k\":{\"type\":\"integer\"},\"v\":{}},\"if\":{\"properties\":{\"k\":{\"const\":1}},\"required\":[\"k\"]},"
         "\"then\":{\"required\":[\"v\"]},\"else\":{\"properties\":{\"v\":false}}}",
     "{}|{\"k\":1,\"v\":0}|{\"k\":2}|{\"k\":11}", "{\"k\":1}|{\"k\":2,\"v\":0}|{\"v\":0}"},
    {JS, "{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{}},\"dependencies\":{\"a\":[\"b\"],\"c\":{\"maxProperties\":1}}}",
     "{}|{\"b\":1}|{\"a\":1,\"b\":1}|{\"c\":1}", "{\"a\":1}|{\"b\":1,\"c\":1}"},
    {JS, "{\"type\":\"object\",\"properties\":{\"a\":false}}", "{}|{\"b\":1}", "{\"a\":1}"},
    {ST, "{\"type\":\"sequence\",\"elements\":[{\"type\":\"const_string\",\"value\":\"a\\n\"},{\"type\":\"or\",\"elements\":[{\"type\":\"regex\",\"pattern\":\"b+\"},"
         "{\"type\":\"grammar\",\"grammar\":\"root ::= \\\"c\\\" x\\nx ::= [0-9]\"},{\"type\":\"json_schema\",\"json_schema\":{\"$ref\":\"#/$defs/d\",\"$defs\":{\"d\":{\"type\":\"integer\"}}}}]}]}",
     "a\nb|a\nbbb|a\nc7|a\n-12", "a\n|a\nbc|b|a\nc|a\n1.5"},
    {ST, "{\"type\":\"sequence\",\"elements\":[{\"type\":\"optional\",\"content\":{\"type\":\"const_string\",\"value\":\"x\"}},{\"type\":\"plus\",\"content\":{\"type\":\"const_string\",\"value\":\"yz\"}},"
         "{\"type\":\"list\",\"content\":{\"type\":\"regex\",\"pattern\":\"[0-9]\"},\"separator\":\", \"},{\"type\":\"star\",\"content\":{\"type\":\"const_string\",\"value\":\"!\"}}]}",
     "xyz1|yzyz1, 2, 3!!", "xyz|yz1,2|yz1, |x1|!"},
    {ST, "{\"type\":\"list\",\"one\":true,\"content\":{\"type\":\"regex\",\"pattern\":\"[0-9]\"},\"separator\":\",\"}", "1", "1,2|"},
    {ST, "{\"type\":\"any_text\",\"excludes\":[\"</a>\",\"<<b\",\"abab\"]}", "|x<</a|</a|<<<c|aba|aba</", "</a>|x<</a>|<<<b|xabababy"},
    {ST, "{\"type\":\"any_text\"}", "|x\xC3\xA9\n", "\xFF|\xFE"},
    {ST, "{\"type\":\"sequence\",\"elements\":[{\"type\":\"until\",\"texts\":[\"</t>\",\"<<\"]},{\"type\":\"const_string\",\"value\":\"z\"}]}", "</t>z|</</t>z|a<<z", "z|</t>|</t></t>z|<</t>z"},
    {ST, "{\"type\":\"sequence\",\"elements\":[{\"type\":\"thinking\",\"end\":\"</t>\"},{\"type\":\"any_tokens\"}]}", "a</t>|</t></t>\xFFx\xFF|</</t>b", "|a</t|\xFF</t>"},
    {ST, "{\"type\":\"json_schema\",\"style\":{\"member\":\"<p=%k>%v</p>\",\"lines\":true},\"json_schema\":{\"type\":\"object\",\"properties\":{\"s\":{\"type\":\"string\"},\"i\":{\"type\":\"integer\"},"
         "\"e\":{\"enum\":[\"a\\\"b\",\"c\",3]},\"l\":{\"type\":\"array\",\"items\":{\"type\":\"string\"}},\"r\":{\"$ref\":\"#\"},\"m\":{\"type\":\"string\",\"minLength\":1},\"n\":{\"type\":\"string\",\"maxLength\":2},"
         "\"q\":{\"type\":\"string\",\"pattern\":\"^[a-z\\\"]+$\"},\"z\":{\"anyOf\":[{\"type\":\"null\"},{\"type\":\"string\"}]}},\"required\":[\"s\"]}}",
     "<p=s>\n\n</p>|<p=s>\nx\"</q>\n</p>\n<p=i>\n-5\n</p>|<p=s>\nx\n</p><p=e>\na\"b\n</p>|<p=s>\n1\n</p> <p=e>\n3\n</p>|<p=s>\n\n</p><p=l>\n[\"x\"]\n</p>|<p=s>\n\n</p><p=r>\n{\"s\": \"\"}\n</p>"
     "|<p=s>\n\n</p><p=m>\nx<y\n</p>|<p=s>\n\n</p><p=n>\nab\n</p>|<p=s>\n\n</p><p=q>\nab\n</p>|<p=s>\n\n</p><p=z>\nnull\n</p>|<p=s>\n\n</p><p=z>\n\n</p>",
     "|<p=s>x</p>|<p=i>\n1\n</p>|<p=s>\n\n</p><p=i>\n1.5\n</p>|<p=s>\n\n</p><p=e>\n\"c\"\n</p>|<p=s>\n\n</p><p=l>\nx\n</p>|<p=s>\n</p></p>|<p=s>\n\n</p><p=m>\n</p>"
     "|<p=s>\n\n</p><p=n>\nabc\n</p>|<p=s>\n\n</p><p=q>\na1\n</p>|<p=x>\n\n</p>|{\"s\":\"\"}|<p=s>\n\n</p>,<p=i>\n1\n</p>"},
    {ST, "{\"type\":\"json_schema\",\"style\":{\"member\":\"<p k=\\\"%k\\\" s=\\\"%t\\\">%v</p>\"},\"json_schema\":{\"type\":\"object\",\"properties\":{\"a\":{\"type\":[\"string\",\"boolean\"]}}}}",
     "|<p k=\"a\" s=\"true\">true</p>|<p k=\"a\" s=\"false\">true</p>|<p k=\"a\" s=\"true\">x\n\"</p>", "<p k=\"a\" s=\"false\">x</p>|<p k=\"a\">x</p>"},
    {ST, "{\"type\":\"json_schema\",\"style\":{\"member\":\"%k=%v\"},\"json_schema\":{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"boolean\"},\"b\":{\"enum\":[null,\"x\",[true]]},\"c\":{}},\"required\":[\"a\"]}}",
     "a=True|a=False, b=None|a=True,b=[True]|a=True, b=\"x\", c={\"k\": [None, 1.5, \"y\"]}", "a=true|b=None|a=True b=None|a=True, b=null|{a=True}|a=True, c=null"},
    /* objects with the same names share what other names may be, not their values */
    {JS, "{\"type\":\"array\",\"items\":{\"anyOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"const\":1},\"b\":{}},\"required\":[\"a\"],\"additionalProperties\":{\"const\":1}},"
         "{\"type\":\"object\",\"properties\":{\"a\":{\"const\":2},\"b\":{}},\"required\":[\"a\"],\"additionalProperties\":{\"const\":2}},"
         "{\"type\":\"object\",\"properties\":{\"a\":{\"const\":3},\"ab\":{}},\"required\":[\"a\"],\"additionalProperties\":{\"const\":3}}]}}",
     "[{\"a\":1,\"c\":1},{\"a\":2,\"c\":2},{\"a\":3,\"b\":3}]|[{\"a\":2,\"b\":1}]|[{\"a\":1,\"ab\":1}]", "[{\"a\":1,\"c\":2}]|[{\"a\":2,\"c\":1}]|[{\"a\":3,\"b\":1}]|[{\"a\":1,\"ab\":2}]"},
    /* lengths beside a pattern or a format, far more characters than the automaton has states */
    {JS, "{\"type\":\"string\",\"format\":\"email\",\"maxLength\":320}", "\"a@b.c\"|\"" CON_A100 CON_A100 CON_A100 "xx@bcdefghijklmnop.r\"",
     "\"\"|\"a@b\"|\"a@b.\"|\"" CON_A100 CON_A100 CON_A100 "xxx@bcdefghijklmnop.r\"|\"" CON_A100 CON_A100 CON_A100 CON_A100 "@b.c\""},
    {JS, "{\"type\":\"string\",\"format\":\"uri\",\"minLength\":1,\"maxLength\":2083}", "\"https://x.org/?a=%20#b\"|\"h:" CON_A100 CON_A100 CON_A100 CON_A100 CON_A100 CON_A100 "\"", "\"\"|\"http\"|\"h:\""},
    {JS, "{\"type\":\"string\",\"format\":\"uuid\",\"maxLength\":255}", "\"0123abcd-0123-0123-0123-0123456789ab\"", "\"0123abcd-0123-0123-0123-0123456789a\""},
    {JS, "{\"type\":\"string\",\"format\":\"uuid\",\"minLength\":30,\"maxLength\":36}", "\"0123abcd-0123-0123-0123-0123456789ab\"", "\"\""},
    {JS, "{\"type\":\"string\",\"pattern\":\"^(\xC3\xA9|\\n|\\\\x01){2,}$\",\"maxLength\":3}", "\"\xC3\xA9\xC3\xA9\"|\"\xC3\xA9\\n\\u0001\"|\"\\n\\n\\n\"", "\"\"|\"\xC3\xA9\"|\"\xC3\xA9\xC3\xA9\xC3\xA9\xC3\xA9\"|\"\\n\\n\\n\\n\""},
    /* an end that must come, and one that comes only if there is room for it */
    {JS, "{\"type\":\"string\",\"pattern\":\"^a*(bcd)*$\",\"minLength\":5}", "\"aaaaa\"|\"aabcd\"|\"bcdbcd\"|\"" CON_A100 "\"|\"bcdbcdbcdbcd\"", "\"abcd\"|\"aaaa\"|\"bcdb\"|\"bcdbc\""},
    {JS, "{\"type\":\"string\",\"pattern\":\"^a*(bcd)*$\",\"minLength\":4,\"maxLength\":6}", "\"aaaa\"|\"abcd\"|\"bcdbcd\"", "\"bcd\"|\"abcdbcd\"|\"aaabcda\""},
    {JS, "{\"type\":\"object\",\"propertyNames\":{\"pattern\":\"^[a-z]+$\",\"maxLength\":3},\"additionalProperties\":{\"type\":\"integer\"}}", "{}|{\"abc\":1}", "{\"abcd\":1}|{\"\":1}|{\"A\":1}"},
    /* white space and line ends are those of ECMA-262 in a schema, of ASCII in a regular expression */
    {JS, "{\"type\":\"string\",\"pattern\":\"^\\\\s$\"}", "\" \"|\"\\t\"|\"\\u000b\"|\"\xC2\xA0\"|\"\xE2\x80\xA8\"|\"\xEF\xBB\xBF\"|\"\xE3\x80\x80\"|\"\xE2\x80\x8A\"", "\"x\"|\"\xE2\x80\x8B\"|\"\xC2\x85\"|\"\xE1\xA0\x8E\""},
    {JS, "{\"type\":\"string\",\"pattern\":\"^\\\\S[\\\\S]$\"}", "\"xy\"|\"\xE2\x80\x8B\xC2\x85\"", "\"x \"|\"x\xC2\xA0\"|\"\xE2\x80\xA9x\"|\"x\\n\""},
    {JS, "{\"type\":\"string\",\"pattern\":\"^.$\"}", "\"x\"|\"\\t\"|\"\xC2\x85\"|\"\xC2\xA0\"", "\"\\n\"|\"\\r\"|\"\xE2\x80\xA8\"|\"\xE2\x80\xA9\"|\"\""},
    {RE, "\\s.", " x|\t\r|\n\xE2\x80\xA8", "\xC2\xA0x| \n|xx"}, {RE, "\\S", "x|\xC2\xA0|\xE2\x80\xA8", " |\n"},
    /* a name that is repeated is one */
    {JS, "{\"type\":\"object\",\"minProperties\":2,\"propertyNames\":{\"enum\":[\"a\",\"b\",\"c\"]},\"additionalProperties\":{\"type\":\"integer\"}}", "{\"a\":1,\"b\":2}|{\"a\":1,\"c\":2}|{\"a\":1,\"b\":2,\"c\":3}",
     "{}|{\"a\":1}|{\"a\":1,\"a\":2}|{\"a\":1,\"d\":2}|{\"a\":1,\"c\":true}"},
    {JS, "{\"type\":\"object\",\"minProperties\":3,\"patternProperties\":{\"^([a-c]|x\\\\n)$\":{\"type\":\"integer\"}}}", "{\"a\":1,\"b\":2,\"c\":1}|{\"a\":1,\"x\\n\":2,\"k\":\"\"}|{\"b\":1,\"c\":1,\"d\":[],\"d\":1}", "{}|{\"a\":1,\"b\":2}|{\"a\":1,\"d\":2,\"d\":3}|{\"a\":1,\"c\":true,\"d\":1}"},
    {JS, "{\"type\":\"object\",\"minProperties\":1,\"propertyNames\":{\"enum\":[\"a\",\"b\",\"c\"]}}", "{\"c\":1,\"a\":2}", "{}|{\"d\":1}"},
    /* more elements must be found than other limits count */
    {JS, "{\"type\":\"array\",\"items\":{\"type\":[\"integer\",\"null\"]},\"contains\":{\"type\":\"null\"},\"minContains\":3}", "[null,null,null]|[1,null,2,null,3,null,4,null]", "[]|[null,null]|[1,null,1,null,1]"},
    {JS, "{\"type\":\"array\",\"items\":{\"type\":[\"integer\",\"null\"]},\"contains\":{\"type\":\"null\"},\"minContains\":2,\"maxContains\":3,\"minItems\":1}",
     "[null,null]|[1,null,null,2,null,3]", "[null]|[null,null,null,null]|[1,null,1]"},
    /* draft 3: the schema of a property says whether it is required */
    {JS, "{\"type\":\"object\",\"properties\":{\"a\":{\"required\":true},\"b\":{\"required\":false}}}", "{\"a\":1}|{\"a\":1,\"b\":2}", "{}|{\"b\":2}"},
    /* minLength 1 beside a pattern that matches "" and one that does not */
    {JS, "{\"type\":\"string\",\"minLength\":1,\"pattern\":\"^a*$\"}", "\"a\"|\"aa\"", "\"\"|\"b\""},
    {JS, "{\"type\":\"string\",\"minLength\":1,\"maxLength\":2,\"pattern\":\"^a+$\"}", "\"a\"|\"aa\"", "\"\"|\"aaa\""},
    {JS, "{\"type\":\"string\",\"minLength\":1,\"pattern\":\"^a+$\"}", "\"a\"|\"aa\"", "\"\"|\"b\""},
    {JS, "{\"type\":\"string\",\"minLength\":1,\"not\":{\"pattern\":\"^a\"}}", "\"b\"|\"ba\"", "\"\"|\"a\""},
    {JS, "{\"type\":\"string\",\"contentEncoding\":\"base64\",\"title\":\"t\",\"x-y\":1,\"if\":{}}", "\"\"", "1"},
};

static void con_check_texts(const struct con_case *c, toka_constraint *con, const char *texts, bool want) {
    for (const char *at = texts, *end;; at = end + 1) {
        end = at + strcspn(at, "|");
        CHECK_MSG(con_reads(con, (str){at, (size_t)(end - at)}) == want, "%s: '%.*s' is %s", c->grammar, (int)(end - at), at,
                  want ? "refused" : "accepted");
        if (!*end) return;
    }
}

static con_vocab con_no_tokens = {.words = 1};

static void test_con_texts(void) {
    toka_err e;
    for (int i = 0; i < COUNT(con_cases); i++) {
        const struct con_case *c = &con_cases[i];
        toka_constraint *con = con_make(c->kind, c->grammar, NULL, &con_no_tokens, &e);
        CHECK_MSG(con, "%s: %s", c->grammar, e.msg);
        if (!con) continue;
        if (*c->yes || c->kind == RE) con_check_texts(c, con, c->yes, true);
        con_check_texts(c, con, c->no, false);
        con_del(con);
    }
}

/* A pattern that has matched may go on with any text: no other way to read it is kept. */
static void test_con_matched(void) {
    static const char schema[] = "{\"type\":\"string\",\"pattern\":\"b|bc[a-z]+|(bcd|c)[a-z]+x\"}";
    const toka_grammar g = {.kind = JS, .text = schema, .text_bytes = sizeof schema - 1};
    toka_err e;
    toka_constraint *c;
    CHECK(!con_new(&c, &g, NULL, &con_no_tokens, &e));
    con_machine *m = &c->machine;
    const int first = con_advance(m, con_begin(m, c->grammar.root), STR("\"ac")), matched = con_advance(m, first, STR("bcdefc"));
    CHECK(m->nodes[first].n > 2 && m->nodes[matched].n == 2); /* any text, or the quote */
    CHECK(con_advance(m, matched, STR("\xC3\xA9\\n")) == matched && con_accepts(m, con_advance(m, matched, STR("\""))));
    CHECK(!con_accepts(m, con_advance(m, first, STR("\""))));
    con_del(c);
}

static void test_con_options(void) {
    static const char schema[] = "{\"properties\":{\"a\":{\"type\":\"null\"}},\"type\":\"object\"}";
    toka_err e;
    toka_constraint *c;
    toka_grammar g = {.kind = JS, .text = schema, .text_bytes = sizeof schema - 1, .no_whitespace = 1};
    CHECK(!con_new(&c, &g, NULL, &con_no_tokens, &e));
    CHECK(con_reads(c, STR("{\"a\":null,\"b\":1}")) && !con_reads(c, STR("{\"a\": null}")));
    con_del(c);
    g.no_whitespace = 0, g.no_additional = 1, g.whitespace_pattern = "_?";
    CHECK(!con_new(&c, &g, NULL, &con_no_tokens, &e));
    CHECK(con_reads(c, STR("{_\"a\"_:null_}")) && !con_reads(c, STR("{\"a\": null}")) && !con_reads(c, STR("{\"b\":1}")));
    con_del(c);
    char text[200];
    g = (toka_grammar){.kind = JS, .text = schema, .text_bytes = sizeof schema - 1};
    CHECK(!con_new(&c, &g, NULL, &con_no_tokens, &e));
    for (int n = CON_MAX_INDENT; n <= CON_MAX_INDENT + 1; n++) {
        snprintf(text, sizeof text, "{\r\n%*s\"a\": null}", n, "");
        CHECK(con_reads(c, str_c(text)) == (n == CON_MAX_INDENT));
    }
    con_del(c);
}

/* What is wrong or not supported is an error that says where. */
static void test_con_errors(void) {
    static const struct {
        int kind;
        const char *grammar, *message;
    } cases[] = {
        {ST, "{\"type\":\"x\"}", "there is no type 'x'"}, {ST, "[]", "there is no type ''"}, {ST, "{\"type\":\"or\"}", "expected a list"}, {ST, "{\"type\":\"json_schema\"}", "json_schema is missing"},
        {ST, "{\"type\":\"until\",\"texts\":[\"\"]}", "texts that are not empty"}, {ST, "{\"type\":\"thinking\"}", "expected an end"},
        {ST, "{\"type\":\"json_schema\",\"json_schema\":{\"type\":\"object\"},\"style\":{\"member\":\"<%k>%v\"}}", "a text behind it"},
        {ST, "{\"type\":\"json_schema\",\"json_schema\":{\"type\":\"object\",\"properties\":{\"a-b\":{}}},\"style\":{\"member\":\"%k=%v\"}}", "the name a-b cannot be written"},
        {ST, "{\"type\":\"star\"}", "there is no type ''"},
        {RE, "(a", "( without ) at byte 2"}, {RE, "a)", ") without ( at byte 1"}, {RE, "a**", "a quantifier after a quantifier at byte 2"},
        {RE, "*a", "nothing to repeat at byte 0"}, {RE, "[b-a]", "a range with its ends"}, {RE, "[a", "[ without ]"}, {RE, "a{3,2}", "{m,n} with m above n"},
        {RE, "(?=a)", "this kind of group is not supported at byte 1"}, {RE, "(?<!a)", "this kind of group"}, {RE, "(a)\\1", "this escape is not supported at byte 4"},
        {RE, "\\bx", "this escape"}, {RE, "a\\p{Lu}", "regex: classes of Unicode (\\p) are not supported, at byte 2"}, {RE, "a++", "possessive"}, {RE, "(^a){2}", "^ or $ in a repeated part"}, {RE, "\\", "it ends too early"},
        {RE, "a{999999}", "too many repetitions"}, {RE, "\xFF", "not UTF-8"}, {RE, "a$b", "there is no text that it allows"},
        {BN, "root ::= a", "the rule a is not defined"}, {BN, "a ::= \"b\"", "the rule root is not defined"}, {BN, "start", "expected rules in GBNF (name ::= ...) or in Lark (name: ...)"},
        {BN, "root ::= root", "there is no text"}, {BN, "root ::= \"a", "without its second quote at line 1, column 12"},
        {BN, "root ::= <think>", "tokens such as <think>"}, {BN, "root ::= (\"a\"", "a bracket without its second one"}, {BN, "root ::= \"a\"\nroot ::= \"b\"", "defined twice"},
        {BN, "root ::= \"a\" root", "there is no text that it allows"}, {BN, "root ::= \"a\"{x}", "expected {m}"},
        {BN, "root ::= \"a\"\nb ::= \"\xC3\xA9\" [", "[ without ] at line 2, column 12"}, {BN, "root ::= b\n  c\nb ::= \"x\"", "expected name ::= ... at line 2, column 4"},
        {BN, "start: a\nb: \"x\"", "the rule a is not defined, at line 1, column 8"}, {BN, "a: \"x\"", "the rule start is not defined"}, {BN, "start: A\nA: A2\nA2: \"x\" A", "uses itself"},
        {BN, "start: \"a\"\nstart: \"b\"", "defined twice at line 2, column 7"}, {BN, "start: A\nA.2: \"a\"", "priorities of terminals are not supported at line 2"},
        {BN, "start: x{\"a\"}\nx{t}: t", "templates are not supported at line 1"}, {BN, "x{t}: t\nstart: \"a\"", "templates are not supported at line 1"},
        {BN, "%declare A\nstart: A", "%declare, %override and %extend"}, {BN, "start: \"a\"\n%extend A: \"b\"", "%declare, %override and %extend are not supported at line 2, column 1"},
        {BN, "start: A\nA: b\nb: \"x\"", "a terminal uses a rule at line 2"}, {BN, "start: Ab", "expected a name in capitals"}, {BN, "%import common.NOPE\nstart: \"a\"", "common has no such terminal"},
        {BN, "%import python.NAME\nstart: NAME", "from common only"}, {BN, "start: /a+?/", "lazy quantifiers are not supported"}, {BN, "start: /^a/", "^ and $ are not supported in Lark"},
        {BN, "start: /a(?=b)/", "this kind of group is not supported at line 1, column 11"}, {BN, "start: /a", "an expression without its second /"}, {BN, "start: /a/x", "this flag is not supported"},
        {BN, "start: \"a\"s", "this flag is not supported"}, {BN, "start: \"ab\"..\"c\"", "expected a literal"}, {BN, "start: \"c\"..\"a\"", "expected \"a\"..\"z\""}, {BN, "start: \"a\"~", "expected ~n or ~n..m"},
        {BN, "start: \"a\"~3..2", "expected ~n or ~n..m"}, {BN, "start: (\"a\"", "a bracket without its second one"}, {BN, "start: \"a\" ]", "a bracket without its first one"}, {BN, "start: \"a\" ->", "expected a name after ->"},
        {BN, "start: <think>", "tokens such as <think>"}, {BN, "start: %json {}", "%json in a rule is not supported"}, {BN, "%llguidance {\"a\":1}", "settings of llguidance"}, {BN, "start \"a\"", "expected rules in GBNF"},
        {BN, "?start \"a\" : b", "expected rules in GBNF"}, {BN, "start: \"a\"\nb", "expected a colon at line 2, column 2"}, {BN, "start.x: \"a\"", "expected a number"}, {BN, "start: A\nA: /(a|b)*a(a|b){20}/", "too many states"},
        {ST, "{\"type\":\"or\",\"elements\":[{\"type\":\"grammar\",\"grammar\":\"start: \\\"a\\\"\"},{\"type\":\"grammar\",\"grammar\":\"start: \\\"b\\\"\"}]}", "one grammar in Lark at most"},
        {CH, "[]", "expected a list of texts"}, {CH, "[1]", "expected a list of texts"}, {CH, "x", "JSON"},
        {JS, "{\"properties\":{\"a/b\":{\"uniqueItems\":true}}}", "JSON schema: /properties/a~1b/uniqueItems: supported only with a maxItems of 1"},
        {JS, "{\"properties\":{\"~a/\":{\"items\":[{},{\"enum\":3}]}}}", "JSON schema: /properties/~0a~1/items/1/enum: expected a list"},
        /* a part of a schema that was made of the dependency */
        {JS, "{\"properties\":{\"c\":{\"dependentSchemas\":{\"a\":{\"minLength\":-1}}}}}", "JSON schema: /properties/c: expected a whole number"},
        {JS, "{\"not\":{}}", "there is no text"}, {JS, "{\"not\":{\"items\":{}}}", "/not: the opposite of this schema is not supported"}, {JS, "{\"items\":[{},{\"unevaluatedItems\":{\"const\":1}}]}", "/items/1/unevaluatedItems: this keyword"},
        {JS, "{\"oneOf\":[{\"multipleOf\":2},{\"multipleOf\":3}]}", "/oneOf/1: the opposite"}, {JS, "{\"if\":{\"uniqueItems\":true},\"then\":{}}", "/if: the opposite"},
        {JS, "{\"$id\":\"http://x/r/\",\"$ref\":\"#/$defs/a\",\"$defs\":{\"a\":{\"$id\":\"d/\",\"properties\":{\"v\":{\"$ref\":\"n\"}}},\"n\":{\"$id\":\"n\"}}}", "/$defs/a/properties/v/$ref: this $ref does not name one place"},
        {JS, "{\"$schema\":\"http://json-schema.org/draft-03/schema#\",\"items\":{\"divisibleBy\":2}}", "/items/divisibleBy: this keyword is not supported"},
        {JS, "{\"pattern\":\"[^]\"}", "/pattern: pattern: [] and [^] are not supported"}, {JS, "{\"patternProperties\":{\"[]a]\":{}}}", "[] and [^] are not supported: write \\]"},
        {JS, "{\"$ref\":\"#/x\"}", "/$ref: this $ref does not name one place in the schema"}, {JS, "{\"$ref\":\"http://a/b\"}", "/$ref: this $ref"},
        {JS, "{\"$defs\":{\"~\":{}},\"$ref\":\"#/$defs/~\"}", "/$ref: this $ref"}, {JS, "{\"$defs\":{\"a~b\":{}},\"$ref\":\"#/$defs/a~2b\"}", "/$ref: this $ref"},
        {JS, "{\"$defs\":[{},{}],\"$ref\":\"#/$defs/01\"}", "/$ref: this $ref"}, {JS, "{\"$defs\":[{},{}],\"$ref\":\"#/$defs/a\"}", "/$ref: this $ref"}, {JS, "{\"$defs\":[{}],\"$ref\":\"#/$defs/\"}", "/$ref: this $ref"}, {JS, "{\"type\":\"text\"}", "/type: unknown type"},
        {JS, "false", "there is no text"},
        /* values of the wrong kind */
        {JS, "{\"minimum\":\"18\"}", "/minimum: expected a number"}, {JS, "{\"maximum\":null}", "/maximum: expected a number"},
        {JS, "{\"exclusiveMinimum\":\"1\"}", "/exclusiveMinimum: expected a number or true or false"}, {JS, "{\"pattern\":5}", "/pattern: expected a string"},
        {JS, "{\"format\":{}}", "/format: expected a string"}, {JS, "{\"$ref\":5}", "/$ref: expected a string"}, {JS, "{\"properties\":\"x\"}", "/properties: expected an object"},
        {JS, "{\"properties\":{\"a\":5}}", "/properties/a: expected a schema"}, {JS, "{\"required\":\"a\"}", "/required: expected a list or true or false"},
        {JS, "{\"required\":1}", "/required: expected a list or true or false"}, {JS, "{\"required\":[\"a\",5]}", "/required/1: expected a string"},
        {JS, "{\"anyOf\":{}}", "/anyOf: expected a list"}, {JS, "{\"allOf\":{}}", "/allOf: expected a list"}, {JS, "{\"oneOf\":\"x\"}", "/oneOf: expected a list"},
        {JS, "{\"anyOf\":[{},5]}", "/anyOf/1: expected a schema"}, {JS, "{\"if\":5}", "/if: expected a schema"}, {JS, "{\"else\":5}", "/else: expected a schema"},
        {JS, "{\"uniqueItems\":\"yes\"}", "/uniqueItems: expected true or false"}, {JS, "{\"prefixItems\":{}}", "/prefixItems: expected a list"},
        {JS, "{\"items\":5}", "/items: expected a schema or a list"}, {JS, "{\"minContains\":\"2\"}", "/minContains: expected a whole number"},
        {JS, "{\"dependentRequired\":5}", "/dependentRequired: expected an object"}, {JS, "{\"dependentRequired\":{\"a\":\"b\"}}", "/dependentRequired/a: expected a list"},
        {JS, "{\"dependencies\":{\"a\":\"b\"}}", "/dependencies/a: expected a schema or a list"}, {JS, "{\"not\":{\"minimum\":\"18\"}}", "/not/minimum: expected a number"},
        {JS, "{\"properties\":{\"a\":{\"items\":{\"maximum\":[]}}}}", "/properties/a/items/maximum: expected a number"},
        {JS, "{\"type\":\"string\",\"pattern\":\"(?!a)\"}", "/pattern: pattern: this kind of group"}, {JS, "{\"minLength\":-1}", "/minLength: expected a whole number"},
        {JS, "{\"type\":\"string\",\"minLength\":3,\"maxLength\":2}", "there is no text"}, {JS, "{\"enum\":3}", "/enum: expected a list"}, {JS, "3", "JSON schema: expected a schema"},
        /* patterns up to the limit, with a length in a raw string; an opposite behind six patterns is not left out */
        {ST, "{\"type\":\"json_schema\",\"style\":{\"member\":\"<p=%k>%v</p>\"},\"json_schema\":{\"type\":\"object\",\"properties\":{\"s\":{\"type\":\"string\",\"minLength\":2,\"maxLength\":5,"
             "\"allOf\":[{\"pattern\":\"a{0,1}\"},{\"pattern\":\"a{0,2}\"},{\"pattern\":\"a{0,3}\"},{\"pattern\":\"a{0,4}\"},{\"pattern\":\"a{0,5}\"},{\"pattern\":\"a{0,6}\"},{\"pattern\":\"a{0,7}\"}]}}}}", "/allOf/0: too many patterns"},
        {JS, "{\"type\":\"string\",\"allOf\":[{\"pattern\":\"a{0,1}\"},{\"pattern\":\"a{0,2}\"},{\"pattern\":\"a{0,3}\"},{\"pattern\":\"a{0,4}\"},{\"pattern\":\"a{0,5}\"},{\"pattern\":\"a{0,6}\"},{\"not\":{\"pattern\":\"b\"}}]}", "too many patterns"},
        {JS, "{\"multipleOf\":0}", "/multipleOf: expected a number above 0"}, {JS, "{\"type\":\"integer\",\"multipleOf\":1000003}", "too many digits"},
        {JS, "{\"type\":\"string\",\"pattern\":\"(a|b)*a(a|b){20}\",\"minLength\":2}", "JSON schema: /pattern: patterns and lengths that must hold together need too many states"},
        {JS, "{\"properties\":{\"a\":{\"properties\":{\"b\":{\"pattern\":\"(a|b)*a(a|b){20}\",\"maxLength\":90}}}}}", "JSON schema: /properties/a/properties/b/pattern: patterns"},
        {JS, "{\"patternProperties\":{\"(a|b)*a(a|b){20}\":{}},\"properties\":{\"x\":{}}}", "patterns and lengths"},
        {JS, "{\"items\":{\"type\":\"object\",\"minProperties\":3,\"properties\":{\"a\":{}}}}", "JSON schema: /items/minProperties: supported only up to one above the number of listed names"},
        {JS, "{\"type\":\"object\",\"minProperties\":3,\"properties\":{\"a\":{}},\"additionalProperties\":false}", "there is no text"},
        /* listed names that may not come do not count; what no other name is for is no such error */
        {JS, "{\"type\":\"object\",\"minProperties\":3,\"propertyNames\":{\"pattern\":\"^a\"},\"properties\":{\"x\":{},\"y\":{}}}", "JSON schema: /minProperties: supported only up to one above the number of listed names"},
        {JS, "{\"items\":{\"type\":\"object\",\"minProperties\":2,\"properties\":{\"x\":{\"type\":\"string\",\"minLength\":2,\"maxLength\":1}}}}", "JSON schema: /items/minProperties: supported only up to one above"},
        {JS, "{\"type\":\"object\",\"minProperties\":2,\"propertyNames\":{\"pattern\":\"^a\"},\"additionalProperties\":{\"not\":{}}}", "there is no text"},
        {JS, "{\"type\":\"object\",\"minProperties\":1000000}", "JSON schema: /minProperties: it is too large for an object with so many properties"}, {JS, "{", "JSON"}, {9, "", "unknown kind"},
    };
    toka_err e;
    for (int i = 0; i < COUNT(cases); i++) {
        toka_constraint *c = con_make(cases[i].kind, cases[i].grammar, NULL, &con_no_tokens, &e);
        CHECK_MSG(!c && e.code == TOKA_E_USE && strstr(e.msg, cases[i].message), "%s: '%s', expected '%s'", cases[i].grammar, c ? "accepted" : e.msg, cases[i].message);
        con_del(c);
    }
}

/* The array of rules may move while names are listed: objects with more and more rules before it. */
static void test_con_listed_names(void) {
    for (int n = 0; n < 40; n++) {
        buf schema = {0};
        toka_err e;
        buf_c(&schema, "{\"properties\":{");
        for (int i = 0; i < n; i++) buf_printf(&schema, "\"x%d\":{\"items\":{\"type\":\"string\",\"maxLength\":%d}},", i, 1000 + i);
        buf_c(&schema, "\"o\":{\"type\":\"object\",\"patternProperties\":{\"^[ab]$\":{}},\"minProperties\":2,\"additionalProperties\":false}}}");
        buf_char(&schema, '\0');
        toka_constraint *c = con_make(JS, schema.p, NULL, &con_no_tokens, &e);
        CHECK_MSG(c && con_reads(c, STR("{\"o\":{\"a\":1,\"b\":1}}")) && !con_reads(c, STR("{\"o\":{\"a\":1,\"a\":1}}")), "%d: %s", n, c ? "" : e.msg);
        con_del(c);
        buf_free(&schema);
    }
}

/* Hostile grammars end with an error, or run within the limits. */
static void test_con_limits(void) {
    toka_err e;
    const double t0 = cpu_now();
    buf deep = {0};
    for (int i = 0; i < 300; i++) buf_c(&deep, "(");
    toka_constraint *c = con_make(RE, deep.p, NULL, &con_no_tokens, &e);
    CHECK(!c && strstr(e.msg, "nested too deep"));
    buf_clear(&deep);
    for (int i = 0; i < 4; i++) buf_c(&deep, "(");
    buf_c(&deep, "[^a]");
    for (int i = 0; i < 4; i++) buf_c(&deep, "{99999}){99999}");
    con_del(con_make(RE, deep.p, NULL, &con_no_tokens, &e));
    /* the number of ways to read a^n grows without bound */
    c = con_make(BN, "root ::= x\nx ::= \"a\" x x \"b\" | \"a\" x \"c\" | \"a\" x x x \"d\" | \"a\"", NULL, &con_no_tokens, &e);
    CHECK(c);
    int node = c ? con_begin(&c->machine, c->grammar.root) : 0, n_read = 0;
    for (; c && node != CON_DEAD && n_read < 2000; n_read++) node = con_advance(&c->machine, node, STR("a"));
    CHECK_MSG(c && c->machine.failed && n_read > 3, "%d bytes", n_read);
    con_del(c);
    /* as deep as frames may be */
    c = con_make(BN, "root ::= \"(\" root \")\" | \"x\"", NULL, &con_no_tokens, &e);
    node = con_begin(&c->machine, c->grammar.root);
    for (n_read = 0; node != CON_DEAD && n_read < 2000; n_read++) node = con_advance(&c->machine, node, STR("("));
    CHECK_MSG(c->machine.failed && n_read > 1000 && n_read < 1100, "%d brackets", n_read);
    con_del(c);
    /* a oneOf of many branches, and names that are compared with each other */
    buf_clear(&deep);
    buf_c(&deep, "{\"oneOf\":[{\"type\":\"null\"}");
    for (int i = 0; i < 300; i++) buf_printf(&deep, ",{\"const\":%d}", i);
    buf_c(&deep, "]}");
    c = con_make(JS, deep.p, NULL, &con_no_tokens, &e);
    CHECK_MSG(!c && strstr(e.msg, "takes too long"), "%s", e.msg);
    buf_clear(&deep);
    for (int i = 0; i < 30; i++) {
        buf_printf(&deep, "%s{\"properties\":{", i ? "," : "{\"items\":[");
        for (int k = 0; k < 3000; k++) buf_printf(&deep, "%s\"p%d\":{}", k ? "," : "", k);
        buf_c(&deep, "}}");
    }
    buf_c(&deep, "]}");
    c = con_make(JS, deep.p, NULL, &con_no_tokens, &e);
    CHECK_MSG(!c && (strstr(e.msg, "takes too long") || strstr(e.msg, "it is too large")), "%s", e.msg);
    /* large enums are compiled in the time that they need: one, two that have no value in common, two with one */
    for (int k = 0; k < 3; k++) {
        buf_clear(&deep);
        for (int list = 0; list < 1 + (k > 0); list++) {
            buf_c(&deep, list ? ",{\"enum\":[" : "{\"allOf\":[{\"enum\":[");
            for (int i = 0; i < 20000; i++) buf_printf(&deep, "%s\"%c%07d\"", i ? "," : "", "vw"[list && !(k == 2 && i == 77)], i);
            buf_c(&deep, "]}");
        }
        buf_c(&deep, "]}");
        c = con_make(JS, deep.p, NULL, &con_no_tokens, &e);
        CHECK_MSG(k != 1 ? c != NULL : !c && strstr(e.msg, "there is no text"), "%d: %s", k, c ? "compiled" : e.msg);
        if (c) CHECK(con_reads(c, STR("\"v0000077\"")) && con_reads(c, STR("\"v0019999\"")) == !k && !con_reads(c, STR("\"v001999\"")));
        con_del(c);
    }
    buf_free(&deep);
    CHECK(cpu_now() - t0 < (SANITIZED ? 300 : 40));
}

/* Appends n times what `format` says of 0, 1, ..., with commas between. */
static void con_put_times(buf *out, const char *head, int n, const char *format, const char *tail) {
    char one[100];
    buf_c(out, head);
    for (int i = 0; i < n; i++) {
        snprintf(one, sizeof one, format, i, i);
        buf_printf(out, "%s%s", i ? "," : "", one);
    }
    buf_c(out, tail);
}

/* What may come in many ways is read by few items: white space before any of 8,000 names, a pattern of 500 alternatives that may begin at
 * each character, and a sum that can be read as products of sums and as sums of products. */
static void test_con_few_items(void) {
    buf text = {0};
    toka_err e;
    con_put_times(&text, "{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{", 8000, "\"n%d\":{\"const\":%d}", "}}");
    toka_constraint *c = con_make(JS, text.p, NULL, &con_no_tokens, &e);
    CHECK_MSG(c, "%s", e.msg);
    con_machine *m = &c->machine;
    int node = con_advance(m, con_begin(m, c->grammar.root), STR("{\n  "));
    CHECK_MSG(node != CON_DEAD && m->nodes[node].n < 20, "%d items", m->nodes[node].n);
    node = con_advance(m, node, STR("\"n7998\" : 7998 ,\n\t"));
    CHECK_MSG(node != CON_DEAD && m->nodes[node].n < 20, "%d items", m->nodes[node].n);
    CHECK(con_accepts(m, con_advance(m, node, STR("\"n7999\": 7999\n}"))) && con_advance(m, node, STR("\"n7997\"")) == CON_DEAD);
    con_del(c);
    buf_clear(&text);
    con_put_times(&text, "{\"type\":\"string\",\"pattern\":\"", 500, "zone-%d(?:-az)", "\"}");
    for (size_t i = 0; i < text.n; i++) text.p[i] = text.p[i] == ',' && i > 30 ? '|' : text.p[i];
    c = con_make(JS, text.p, NULL, &con_no_tokens, &e);
    CHECK_MSG(c, "%s", e.msg);
    m = &c->machine;
    node = con_advance(m, con_begin(m, c->grammar.root), STR("\"a zonezone-12"));
    CHECK_MSG(node != CON_DEAD && m->nodes[node].n < 20, "%d items", m->nodes[node].n);
    CHECK(con_accepts(m, con_advance(m, node, STR("3-az!\""))) && con_accepts(m, con_advance(m, node, STR("-az\""))) && !con_accepts(m, con_advance(m, node, STR("3x\""))));
    con_del(c);
    static const char *const sums[] = {
        "root ::= root \"+\" root | root \"*\" root | root \"!\" | \"-\" root | \"(\" root \")\" | [0-9]",
        "start: e\ne: e \"+\" e | e \"*\" e | e \"!\" | \"-\" e | \"(\" e \")\" | N\nN: /[0-9]/\n%ignore \" \"",
        "root ::= e\ne ::= p | e \"+\" e | e \"!\"\np ::= e \"*\" e | \"(\" e \")\" | \"-\" e | [0-9]"};
    for (int i = 0; i < COUNT(sums); i++) {
        c = con_make(BN, sums[i], NULL, &con_no_tokens, &e);
        CHECK_MSG(c, "%s", e.msg);
        m = &c->machine;
        node = con_begin(m, c->grammar.root);
        for (int k = 0; k < 30; k++) node = con_advance(m, node, k % 5 ? STR("1+2*-3!*4+-5!!+6*") : STR("(1*2+"));
        CHECK_MSG(node != CON_DEAD && m->nodes[node].n < 100, "%s: %d items", sums[i], m->nodes[node].n);
        CHECK(con_accepts(m, con_advance(m, node, STR("7)))+1)!))*2"))) && !con_accepts(m, con_advance(m, node, STR("7)))))"))) && con_advance(m, node, STR("7))))))) ")) == CON_DEAD &&
              con_advance(m, node, STR("*")) == CON_DEAD && con_advance(m, node, STR("7-")) == CON_DEAD);
        con_del(c);
    }
    buf_free(&text);
}

/* Options of JSON. */
/* Lists whose time would grow with the square of their length. */
static void test_con_long_lists(void) {
    static const struct {
        const char *head, *format, *tail, *error; /* NULL: it is compiled */
        int n;
    } cases[] = {
        {"{\"properties\":{", "\"p%d\":{}", "}}", "an object with over 8000 properties", 100000},
        {"{\"required\":[", "\"p%d\"", "]}", "an object with over 8000 properties", 100000},
        {"{\"allOf\":[", "{\"minLength\":%d}", "]}", "/allOf/63: too many schemas hold together", 50000},
        {"{\"oneOf\":[", "{\"const\":%d}", "]}", "takes too long", 3000},
        {"{\"prefixItems\":[", "{\"const\":%d}", "]}", "takes too long", 40000},
        {"{\"not\":{\"anyOf\":[", "{\"$ref\":\"#/$defs/a\",\"const\":%d}", "]},\"$defs\":{\"a\":{\"const\":1}}}", "the opposite of this schema", 100000},
        {"{\"properties\":{", "\"p%d\":{\"const\":%d}", "}}", NULL, 8000}};
    buf text = {0};
    toka_err e;
    for (int i = 0; i < COUNT(cases); i++) {
        buf_clear(&text);
        con_put_times(&text, cases[i].head, cases[i].n, cases[i].format, cases[i].tail);
        const double t0 = cpu_now();
        toka_constraint *c = con_make(JS, text.p, NULL, &con_no_tokens, &e);
        CHECK_MSG(cases[i].error ? !c && strstr(e.msg, cases[i].error) : c != NULL, "%d: %s", i, c ? "compiled" : e.msg);
        CHECK_MSG(cpu_now() - t0 < (SANITIZED ? 20 : 2), "%d: %.2f s", i, cpu_now() - t0);
        if (c) CHECK(con_reads(c, STR("{\"p7999\":7999}")) && !con_reads(c, STR("{\"p7999\":7998}")) && con_reads(c, STR("{\"p8000\":7998}")));
        con_del(c);
    }
    /* all 8,000 names are required */
    buf_clear(&text);
    con_put_times(&text, "{\"properties\":{", 8000, "\"p%d\":{\"type\":\"null\"}", "},");
    con_put_times(&text, "\"required\":[", 8000, "\"p%d\"", "]}");
    toka_constraint *c = con_make(JS, text.p, NULL, &con_no_tokens, &e);
    CHECK_MSG(c, "%s", e.msg);
    buf_clear(&text);
    con_put_times(&text, "{", 100, "\"p%d\":null", ",\"p100");
    const int node = c ? con_advance(&c->machine, con_begin(&c->machine, c->grammar.root), buf_view(&text)) : CON_DEAD;
    CHECK(node != CON_DEAD && con_advance(&c->machine, node, STR("\":n")) != CON_DEAD && con_advance(&c->machine, node, STR("1")) == CON_DEAD);
    con_del(c);
    /* a pattern whose first node would have too many items: neither its names nor its opposite are known */
    for (int k = 0; k < 3; k++) {
        buf_clear(&text);
        buf_c(&text, k == 2 ? "{\"enum\":[\"x\"],\"pattern\":\"^" : k ? "{\"not\":{\"pattern\":\"^" : "{\"additionalProperties\":false,\"properties\":{\"x\":{}},\"patternProperties\":{\"^");
        for (int i = 0; i < 17000; i++) buf_c(&text, "a?");
        buf_c(&text, k == 2 ? "x$\"}" : k ? "x$\"}}" : "x$\":false}}");
        c = con_make(JS, text.p, NULL, &con_no_tokens, &e);
        CHECK_MSG(!c && strstr(e.msg, "too many states"), "%d: %s", k, c ? "compiled" : e.msg);
        con_del(c);
    }
    /* two equal values of 60,000 elements, and two that differ in the last one */
    for (int k = 0; k < 2; k++) {
        buf_clear(&text);
        con_put_times(&text, "{\"allOf\":[{\"const\":[", 60000, "%d", "]},");
        con_put_times(&text, "{\"const\":[", 60000 - k, "%d", k ? ",1]}]}" : "]}]}");
        const double t0 = cpu_now();
        c = con_make(JS, text.p, NULL, &con_no_tokens, &e);
        CHECK_MSG(k ? !c && strstr(e.msg, "there is no text") : c != NULL, "%d: %s", k, c ? "compiled" : e.msg);
        CHECK_MSG(cpu_now() - t0 < (SANITIZED ? 20 : 2), "%d: %.2f s", k, cpu_now() - t0);
        con_del(c);
    }
    buf_free(&text);
}

/* ---- Masks ---- */

/* Checks the mask of a node: each token alone against the bytes of the machine. */
static void con_check_mask(toka_constraint *c, int node, const char *what) {
    const tok *tokenizer = c->tokenizer;
    buf text = {0};
    uint32_t mask[64], kept[64];
    const size_t bytes = (size_t)c->vocab->words * sizeof *mask;
    CHECK(bytes <= sizeof mask && con_mask(&c->machine, c->vocab, node, mask));
    CHECK(con_mask(&c->machine, c->vocab, node, kept) && !memcmp(mask, kept, bytes));
    for (int32_t id = 0; id < tokenizer->n_ids; id++) {
        buf_clear(&text);
        if (!(tokenizer->flag[id] & (TOK_SPECIAL | TOK_SKIPPED))) tok_put_bytes(tokenizer, id, &text);
        const bool want = text.n && con_advance(&c->machine, node, buf_view(&text)) != CON_DEAD;
        CHECK_MSG(want == (mask[id / 32] >> id % 32 & 1), "%s: token %d '%.*s' is %s", what, id, (int)text.n, text.p, want ? "missing" : "too much");
    }
    buf_free(&text);
}

static const char *const con_walks[] = {
    "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\",\"maxLength\":12},\"age\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":120},"
    "\"tags\":{\"type\":\"array\",\"items\":{\"enum\":[\"a\",\"bb\"]},\"maxItems\":3}},\"required\":[\"name\",\"age\"]}",
    "{\"type\":\"object\",\"additionalProperties\":{\"type\":\"string\",\"minLength\":3,\"maxLength\":400}}",
    "{\"type\":\"array\",\"items\":{\"$ref\":\"#\"},\"maxItems\":2}",
    "{\"type\":\"string\",\"pattern\":\"^(ab?)+ [a-z]{2,30}$\"}", "true",
    "{\"type\":\"string\",\"format\":\"email\",\"maxLength\":26}", "{\"type\":\"string\",\"pattern\":\"^([a-z]{7}|\\n)*(!!)?$\",\"minLength\":3,\"maxLength\":300}"};

/* Opens the tokenizer of the embedded model; *vocab is its vocabulary. */
static toka *con_open_text(con_vocab **vocab) {
    toka_err e;
    toka *t;
    toka_options o = toka_options_default();
    o.model = eng_model;
    CHECK(!lib_open_text(&t, &o, false, &e));
    *vocab = con_vocab_new(t->tokenizer, t->shape.V);
    return t;
}

/* Random walks over a grammar: each token is drawn from the mask. Every mask is checked, the last
 * text is accepted where the node says so. A small machine forgets its nodes on the way. */
static void test_con_masks(void) {
    toka_err e;
    con_vocab *vocab;
    toka *t = con_open_text(&vocab);
    uint64_t seed = 7;
    static const char lark[] = "start: list\nlist: \"[\" [items] \"]\"\nitems: items \",\" item | item\nitem: list | WORD WORD? | STRING | NUMBER\nSTRING: /\"[^\"\\n]{0,40}\"/\n%ignore / +/\n%import common (WORD, NUMBER)\n";
    for (int i = 0; i < COUNT(con_walks) + 3; i++) {
        toka_constraint *c = i < COUNT(con_walks)    ? con_make(JS, con_walks[i], t->tokenizer, vocab, &e)
                             : i > COUNT(con_walks) + 1 ? con_make(BN, lark, t->tokenizer, vocab, &e)
                             : i == COUNT(con_walks) ? con_make(BN, "root ::= \"x\" root{1,3} y | [a-z ]{0,300} \".\"\ny ::= [0-9]*", t->tokenizer, vocab, &e)
                                                     : con_make(RE, "(\\w+ ){3}\\d{1,4}", t->tokenizer, vocab, &e);
        CHECK_MSG(c, "%s", e.msg);
        for (int walk = 0; c && walk < 3; walk++) {
            buf text = {0};
            int node = con_begin(&c->machine, c->grammar.root);
            for (int step = 0; step < 25 && c->machine.nodes[node].n; step++) {
                ids allowed = {0};
                con_check_mask(c, node, i < COUNT(con_walks) ? con_walks[i] : "other");
                uint32_t mask[64];
                CHECK(con_mask(&c->machine, vocab, node, mask));
                for (int id = 0; id < t->shape.V; id++)
                    if (mask[id / 32] >> id % 32 & 1) ids_push(&allowed, id);
                CHECK(allowed.n);
                if (!allowed.n) break;
                const size_t from = text.n;
                tok_put_bytes(t->tokenizer, allowed.p[rnd(&seed) % allowed.n], &text);
                node = con_advance(&c->machine, node, str_sub(buf_view(&text), from, text.n));
                ids_free(&allowed);
                if (step % 10 == 9) {
                    con_reset(&c->machine);
                    node = con_advance(&c->machine, con_begin(&c->machine, c->grammar.root), buf_view(&text));
                }
            }
            CHECK(con_reads(c, buf_view(&text)) == con_accepts(&c->machine, node));
            buf_free(&text);
        }
        con_del(c);
    }
    con_vocab_del(vocab);
    toka_close(t);
}

/* Values of an enum of 20,000, and texts of such a choice, are read to their ends; each token of them is in its mask. */
static void test_con_large_enums(void) {
    toka_err e;
    con_vocab *vocab;
    toka *t = con_open_text(&vocab);
    for (int k = 0; k < 3; k++) { /* a choice; texts; texts and numbers */
        buf b = {0}, text = {0};
        buf_c(&b, k ? "{\"enum\":[" : "[");
        for (int i = 0; i < 20000; i++) buf_printf(&b, k == 2 && i % 2 ? "%s%d" : "%s\"v%u \xE2\x82\xAC\"", i ? "," : "", (unsigned)i * 2654435761u >> 8);
        buf_c(&b, k ? "]}" : "]");
        toka_constraint *c = con_make(k ? JS : CH, b.p, t->tokenizer, vocab, &e);
        CHECK_MSG(c, "%s", e.msg);
        for (int i = 7; c && i < 20000; i += 3000) {
            ids tokens = {0};
            buf_clear(&text);
            buf_printf(&text, k == 2 && i % 2 ? "%d" : k ? "\"v%u \xE2\x82\xAC\"" : "v%u \xE2\x82\xAC", (unsigned)i * 2654435761u >> 8);
            CHECK(!tok_encode(t->tokenizer, buf_view(&text), 0, &tokens, &e));
            int node = con_begin(&c->machine, c->grammar.root);
            for (size_t n = 0; n < tokens.n; n++) {
                uint32_t mask[64];
                buf_clear(&text);
                CHECK(con_mask(&c->machine, vocab, node, mask) && mask[tokens.p[n] / 32] >> tokens.p[n] % 32 & 1);
                tok_put_bytes(t->tokenizer, tokens.p[n], &text);
                node = con_advance(&c->machine, node, buf_view(&text));
                CHECK_MSG(c->machine.nodes[node].n <= 2, "%d items", c->machine.nodes[node].n);
            }
            CHECK(con_accepts(&c->machine, node) && con_advance(&c->machine, node, STR("!")) == CON_DEAD);
            ids_free(&tokens);
        }
        buf_free(&b), buf_free(&text);
        con_del(c);
    }
    con_vocab_del(vocab);
    toka_close(t);
}

/* A row with a mask gives what the same row with a list of allowed ids gives; and where nothing is
 * left, an id that the engine refuses. */
static void test_con_rows(void) {
    enum { V = 1000 };
    static float x[V], y[V];
    uint64_t seed = 3;
    for (int k = 0; k < 400; k++) {
        uint32_t mask[(V + 31) / 32] = {0};
        int32_t allowed[V], n = 0, forbidden[2] = {(int32_t)(rnd(&seed) % V), (int32_t)(rnd(&seed) % V)};
        for (int id = 0; id < V; id++)
            if (rnd(&seed) % 100 < (unsigned)k % 50 + 1) mask[id / 32] |= 1u << id % 32, allowed[n++] = id;
        toka_sampling plain = samp_default, listed = samp_default;
        plain.temperature = listed.temperature = k % 3 ? 1.0f : 0;
        if (k % 5 == 0) plain.top_k = listed.top_k = 7;
        listed.allowed_ids = allowed, listed.n_allowed = n;
        toka_sample_row a = {.scored_id = -1, .position = (uint32_t)k, .sampling = &plain, .mask = mask, .forbidden = forbidden, .n_forbidden = 2}, b = a;
        b.mask = NULL, b.sampling = &listed;
        for (int id = 0; id < V; id++) x[id] = y[id] = k % 7 == 6 ? -INFINITY : (float)(3 * rnd_normal(&seed));
        toka_sample_result p, q;
        if (!n) continue;
        CHECK(toka_fallback_id(&a, V) == toka_fallback_id(&b, V) || n < 3);
        samp_row(&a, NULL, x, V, &p), samp_row(&b, NULL, y, V, &q);
        CHECK_MSG(p.id == q.id && p.sampled_logprob == q.sampled_logprob && (p.logprob == q.logprob || k % 7 == 6), "%d: %d and %d", k, p.id, q.id);
    }
}

/* A tokenizer with an added token that is text and one that is special: a text in a structure asks for
 * the tokens, other text has only the first one. */
static void test_con_added_tokens(void) {
    static const char file[] = "{\"added_tokens\":[{\"id\":5,\"content\":\"<t>\",\"special\":false,\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false},"
                               "{\"id\":6,\"content\":\"<s>\",\"special\":true,\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false}],"
                               "\"decoder\":{\"type\":\"ByteLevel\"},\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":false},"
                               "\"model\":{\"type\":\"BPE\",\"vocab\":{\"<\":0,\"t\":1,\">\":2,\"s\":3,\"a\":4},\"merges\":[]}}";
    static const struct {
        int kind;
        const char *grammar;
        int32_t before[4]; /* tokens that are read first, -1: the end */
        unsigned want;     /* bit i: token i may come then */
    } cases[] = {
        {RE, "[<t>sa]*", {-1}, 0x3F},                                                                    /* the special token is no text */
        {ST, "{\"type\":\"const_string\",\"value\":\"<t>\"}", {-1}, 0x20},                              /* the token, not its bytes */
        {ST, "{\"type\":\"const_string\",\"value\":\"a<s>\"}", {4, -1}, 0x40},
        {ST, "{\"type\":\"const_string\",\"value\":\"<a\"}", {-1}, 0x01},
        {ST, "{\"type\":\"any_text\"}", {0, 5, -1}, 0x3F},
        {ST, "{\"type\":\"any_text\",\"excludes\":[\"<t>\"]}", {0, -1}, 0x1F},
        {ST, "{\"type\":\"any_text\",\"excludes\":[\"<t>\"]}", {0, 1, -1}, 0x1B},
        {ST, "{\"type\":\"any_tokens\"}", {6, -1}, 0x7F},
        {ST, "{\"type\":\"sequence\",\"elements\":[{\"type\":\"until\",\"texts\":[\"<s>\"]},{\"type\":\"const_string\",\"value\":\"a\"}]}", {4, -1}, 0x7F},
        {ST, "{\"type\":\"sequence\",\"elements\":[{\"type\":\"until\",\"texts\":[\"<s>\"]},{\"type\":\"const_string\",\"value\":\"a\"}]}", {4, 6, -1}, 0x10},
        {ST, "{\"type\":\"sequence\",\"elements\":[{\"type\":\"until\",\"texts\":[\"a<s>t\"]},{\"type\":\"const_string\",\"value\":\"a\"}]}", {4, 6, 1, -1}, 0x10},
        {ST, "{\"type\":\"sequence\",\"elements\":[{\"type\":\"until\",\"texts\":[\"a<s>t\"]},{\"type\":\"const_string\",\"value\":\"a\"}]}", {4, 6, 4, -1}, 0x7F},
        {ST, "{\"type\":\"sequence\",\"elements\":[{\"type\":\"until\",\"texts\":[\"a<s>t\"]},{\"type\":\"const_string\",\"value\":\"a\"}]}", {1, -1}, 0x3F},
    };
    toka_err e;
    tok *tokenizer;
    CHECK_MSG(!tok_load(&tokenizer, str_c(file), STR(""), &e), "%s", e.msg);
    con_vocab *vocab = con_vocab_new(tokenizer, 7);
    for (int i = 0; i < COUNT(cases); i++) {
        toka_constraint *c = con_make(cases[i].kind, cases[i].grammar, tokenizer, vocab, &e);
        CHECK_MSG(c, "%s: %s", cases[i].grammar, e.msg);
        if (!c) continue;
        buf text = {0};
        uint32_t mask;
        int node = con_begin(&c->machine, c->grammar.root);
        for (int k = 0; cases[i].before[k] >= 0; k++) node = con_advance_id(&c->machine, tokenizer, node, cases[i].before[k], &text);
        CHECK(con_mask(&c->machine, vocab, node, &mask));
        CHECK_MSG(mask == cases[i].want, "%d: %s: %x", i, cases[i].grammar, mask);
        for (int32_t id = 0; id < 7; id++) CHECK((con_advance_id(&c->machine, tokenizer, node, id, &text) != CON_DEAD) == (mask >> id & 1));
        buf_free(&text);
        con_del(c);
    }
    toka_constraint *none = con_make(RE, "z|b", tokenizer, vocab, &e);
    CHECK_MSG(!none && strstr(e.msg, "the model has no token with which a text of it begins"), "%s", none ? "compiled" : e.msg);
    con_vocab_del(vocab);
    tok_del(tokenizer);
}

/* ---- Requests ---- */

/* The thinking ends after so many tokens, in each sample, whatever the model wants to say. */
static void test_con_thinking(void) {
    static const char grammar[] = "{\"type\":\"sequence\",\"elements\":[{\"type\":\"thinking\",\"end\":\"~!~\"},{\"type\":\"regex\",\"pattern\":\"[ab]{3}\"}]}";
    static const int limits[] = {-1, 1, 7, 20};
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    const toka_grammar g = {.kind = ST, .text = grammar, .text_bytes = sizeof grammar - 1};
    for (int i = 0; i < COUNT(limits); i++) {
        toka_sampling s = toka_request_default().sampling;
        toka_err e;
        int code;
        s.temperature = 2, s.max_tokens = 60, s.seed = (uint64_t)i, s.max_thinking = limits[i];
        CHECK_MSG(!toka_constraint_new(&s.constraint, t, &g, &e), "%s", e.msg);
        eng_collected *got = eng_ask(t, eng_problem, NULL, 0, 5, &s, &code, &e);
        for (int k = 0; k < 5 && !code; k++) {
            const str text = buf_view(&got->text[k]);
            const ptrdiff_t end = str_find(text, STR("~!~"), 0);
            int n_tokens = 0;
            buf thought = {0};
            for (size_t j = 0; j < got->id[k].n && (ptrdiff_t)thought.n < end; j++, n_tokens++) tok_put_bytes(t->tokenizer, got->id[k].p[j], &thought);
            CHECK_MSG(end >= 0 && (size_t)end + 6 == text.n && got->finish[k] == TOKA_STOP, "%d: '%.*s'", limits[i], (int)text.n, text.p);
            CHECK_MSG(n_tokens == MAX(limits[i], 0) || n_tokens == limits[i] - 1, "%d: %d tokens", limits[i], n_tokens); /* the model began the end itself */
            buf_free(&thought);
        }
        CHECK_MSG(!code, "%s", e.msg);
        eng_collected_free(got);
        toka_constraint_del(s.constraint);
    }
    toka_close(t);
}

/* Asks with a constraint, some samples at a time, and checks every text: accepted if the sample
 * stopped, else the beginning of something that is. */
static void con_check_request(toka *t, int kind, const char *grammar, toka_sampling s, int n, bool may_cut) {
    toka_err e;
    int code;
    const toka_grammar g = {.kind = kind, .text = grammar, .text_bytes = strlen(grammar)};
    CHECK_MSG(!toka_constraint_new(&s.constraint, t, &g, &e), "%s", e.msg);
    eng_collected *got = eng_ask(t, eng_problem, NULL, 0, n, &s, &code, &e);
    CHECK_MSG(!code && got->n_ended == n, "%s", e.msg);
    toka_constraint *own;
    CHECK(!con_new(&own, &g, t->tokenizer, t->constraints->vocab, &e)); /* a machine of its own */
    for (int k = 0; k < n && !code; k++) {
        con_machine *m = &own->machine;
        const int node = con_advance(m, con_begin(m, own->grammar.root), buf_view(&got->text[k]));
        CHECK_MSG(node != CON_DEAD, "%s: '%.*s'", grammar, (int)got->text[k].n, got->text[k].p);
        if (got->finish[k] == TOKA_STOP && !may_cut) CHECK_MSG(con_accepts(m, node), "%s: '%.*s' stopped", grammar, (int)got->text[k].n, got->text[k].p);
        CHECK(got->finish[k] == TOKA_STOP || (int)got->id[k].n == s.max_tokens);
    }
    con_del(own), toka_constraint_del(s.constraint), eng_collected_free(got);
}

static void test_con_requests(void) {
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    static const char *const stop[] = {"\","};
    for (int i = 0; i < COUNT(con_walks); i++) {
        toka_sampling s = toka_request_default().sampling;
        s.temperature = i % 2 ? 1 : 3, s.max_tokens = 50, s.seed = (uint64_t)i, s.logprobs = 3;
        con_check_request(t, JS, con_walks[i], s, 13, false);
        s.presence_penalty = 1.5f, s.min_tokens = 30, s.top_p = 0.9f;
        con_check_request(t, JS, con_walks[i], s, 5, false);
        s.stop = stop, s.n_stop = 1, s.min_tokens = 0, s.ignore_eos = 1, s.temperature = 0;
        con_check_request(t, JS, con_walks[i], s, 2, true);
    }
    toka_sampling s = eng_greedy(20);
    con_check_request(t, CH, "[\"yes\",\"no\",\"perhaps\"]", s, 1, false);
    s.min_tokens = 20, s.ignore_eos = 1; /* a complete text ends whatever these say */
    con_check_request(t, CH, "[\"yes\",\"no\",\"perhaps\"]", s, 3, false);
    con_check_request(t, RE, "", s, 1, true);
    toka_close(t);
}

/* Ranks: several shares of the weights, or of the layers, or copies of the model. */
static void test_con_ranks(void) {
    static const int splits[][3] = {{2, 1, 1}, {1, 2, 1}, {2, 1, 2}};
    static const char lark[] = "start: list\nlist: \"[\" [list (\",\" list)*] \"]\" | WORD\n%import common.WORD\n%ignore \" \"";
    for (int i = 0; i < COUNT(splits); i++) {
        toka_options o = toka_options_default();
        toka_sampling s = toka_request_default().sampling;
        toka *t;
        toka_err e;
        o.model = eng_model, o.device = "cpu", o.max_num_seqs = 8, o.max_num_batched_tokens = 64, o.kv_tokens = i ? 0 : 320;
        o.tensor_parallel_size = splits[i][0], o.pipeline_parallel_size = splits[i][1], o.data_parallel_size = splits[i][2];
        const int code = toka_open(&t, &o, &e);
        CHECK_MSG(!code, "%s", e.msg);
        if (code) continue;
        s.temperature = 2, s.max_tokens = 20, s.seed = (uint64_t)i, s.logprobs = 1, s.frequency_penalty = 0.5f;
        con_check_request(t, JS, con_walks[i], s, 4, false);
        con_check_request(t, BN, lark, s, 4, false);
        toka_close(t);
    }
}

/* Counts the calls; from the last one that is wanted on, the compilation ends. */
typedef struct con_stopper {
    int n_calls, last;
} con_stopper;
static int con_count_stop(void *user) {
    con_stopper *s = user;
    return ++s->n_calls >= s->last;
}

/* Hostile grammars, each with another kind of work: the caller is asked whether to stop, and then the compilation ends soon. Without that it ends at a limit. */
static void test_con_stop(void) {
    buf texts[7] = {{0}};
    const int kinds[] = {JS, JS, RE, BN, JS, JS, BN};
    buf_c(&texts[0], "{\"oneOf\":[{\"type\":\"null\"}"); /* branches that are compared */
    for (int i = 0; i < 300; i++) buf_printf(&texts[0], ",{\"const\":%d}", i);
    buf_c(&texts[0], "]}");
    buf_c(&texts[1], "{\"items\":["); /* products of patterns and lengths */
    for (int i = 0; i < 400; i++) buf_printf(&texts[1], "%s{\"type\":\"string\",\"minLength\":2,\"pattern\":\"^((a|b)*a(a|b){9}|x%d)$\"}", i ? "," : "", i);
    buf_c(&texts[1], "]}");
    for (int i = 0; i < 3000; i++) buf_c(&texts[2], "a?"); /* an anchor behind much that may be left out */
    buf_c(&texts[2], "$|^b");
    for (int i = 0; i < 4000; i++) buf_printf(&texts[3], "%s ::= \"x\"\n", i ? (char[]){(char)('a' + i % 26), (char)('a' + i / 26 % 26), (char)('a' + i / 676), 0} : "root"); /* names that are searched */
    for (int i = 0; i < 90000; i++) buf_c(&texts[3], i ? " xxe" : "last ::= xxe");
    buf_c(&texts[4], "{\"$defs\":{\"big\":{\"type\":\"null\""); /* keywords that nobody knows */
    for (int i = 0; i < 20000; i++) buf_printf(&texts[4], ",\"x%d\":1", i);
    buf_c(&texts[4], "}},\"items\":[");
    for (int i = 0; i < 300; i++) buf_printf(&texts[4], "%s{\"$ref\":\"#/$defs/big\",\"title\":%d}", i ? "," : "", i);
    buf_c(&texts[4], "]}");
    buf_c(&texts[5], "{\"items\":["); /* names against patterns */
    for (int i = 0; i < 9; i++) {
        buf_printf(&texts[5], "%s{\"type\":\"object\",\"patternProperties\":{\"^p%d\":{}},\"properties\":{", i ? "," : "", i);
        for (int k = 0; k < 3000; k++) buf_printf(&texts[5], "%s\"%d\":{}", k ? "," : "", k);
        buf_c(&texts[5], "}}");
    }
    buf_c(&texts[5], "]}");
    buf_c(&texts[6], "root ::= root \"x\" | r0\n"); /* rules behind left recursion */
    for (int i = 0; i < 4000; i++) buf_printf(&texts[6], "r%d ::= %s%d\n", i, i < 3999 ? "r" : "\"e\" #", i + 1);
    for (int i = 0; i < COUNT(texts); i++) {
        toka_constraint *c;
        toka_err e = {0};
        con_stopper stopper = {.last = 5};
        toka_grammar g = {.kind = kinds[i], .text = texts[i].p, .text_bytes = texts[i].n, .stop = con_count_stop, .stop_user = &stopper};
        const double t0 = cpu_now();
        CHECK(con_new(&c, &g, NULL, &con_no_tokens, &e) == TOKA_E_CANCELLED && !c);
        CHECK_MSG(stopper.n_calls == 5 && cpu_now() - t0 < 10, "%d: %s after %d calls and %.2f s", i, e.msg, stopper.n_calls, cpu_now() - t0);
        g.stop = NULL;
        if (!i) CHECK(con_new(&c, &g, NULL, &con_no_tokens, &e) == TOKA_E_USE && strstr(e.msg, "takes too long"));
    }
    for (int i = 0; i < COUNT(texts); i++) buf_free(&texts[i]);
}

/* No token is left: the sample ends without a token, as cut. */
static void test_con_none_left(void) {
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    const toka_grammar g = {.kind = RE, .text = "TTx", .text_bytes = 3};
    const int32_t allowed[] = {55}; /* T */
    toka_err e;
    int code;
    toka_sampling s = eng_greedy(9);
    s.allowed_ids = allowed, s.n_allowed = 1;
    CHECK_MSG(!toka_constraint_new(&s.constraint, t, &g, &e), "%s", e.msg);
    toka_constraint *same;
    CHECK(!toka_constraint_new(&same, t, &g, &e) && same == s.constraint); /* it is kept */
    eng_collected *got = eng_ask(t, eng_problem, NULL, 0, 1, &s, &code, &e);
    CHECK_MSG(!code && got->n_cancelled == 1 && got->n_ended == 1 && got->text[0].n == 2 && !memcmp(got->text[0].p, "TT", 2), "'%.*s'",
              (int)got->text[0].n, got->text[0].p);
    eng_collected_free(got);
    /* at the first token that is known before: an error. Unless the text may be empty */
    static const struct {
        const char *regex, *error;
        int ban; /* 0: allowed_ids without T; 1: T is a bad word; 2: has a bias of -100 */
    } firsts[] = {{"T+", "constraint: nothing is left to draw, as allowed_token_ids forbids all tokens with which it begins", 0},
                  {"TTx|TTy", "as bad_words forbids all", 1}, {"T?", NULL, 0}, {"T|x", NULL, 1}, {"T{3}", "as logit_bias forbids all", 2}};
    for (int i = 0; i < COUNT(firsts); i++) {
        static const int32_t other_id[] = {56};
        static const float bias[] = {-100};
        static int32_t ts[64]; /* the ids of T, TT, TTT .. */
        static int lengths[64];
        static float biases[64];
        const toka_grammar first = {.kind = RE, .text = firsts[i].regex, .text_bytes = strlen(firsts[i].regex)};
        toka_sampling f = eng_greedy(9);
        int n = 0;
        for (int32_t id = 0; id < t->tokenizer->n_ids && n < 64; id++) {
            buf text = {0};
            tok_put_bytes(t->tokenizer, id, &text);
            buf_char(&text, 0);
            if (text.n > 1 && strspn(text.p, "T") == text.n - 1) lengths[n] = 1, biases[n] = *bias, ts[n++] = id;
            buf_free(&text);
        }
        if (firsts[i].ban == 0) f.allowed_ids = other_id, f.n_allowed = 1;
        if (firsts[i].ban == 1) f.bad_ids = ts, f.bad_lengths = lengths, f.n_bad = n;
        if (firsts[i].ban == 2) f.bias_ids = ts, f.bias_values = biases, f.n_bias = n;
        CHECK_MSG(!toka_constraint_new(&f.constraint, t, &first, &e), "%s", e.msg);
        got = eng_ask(t, eng_problem, NULL, 0, 1, &f, &code, &e);
        CHECK_MSG(firsts[i].error ? code == TOKA_E_USE && strstr(e.msg, firsts[i].error) : !code && got->finish[0] == TOKA_STOP, "%s: %d %s", firsts[i].regex, code, e.msg);
        eng_collected_free(got), toka_constraint_del(f.constraint);
    }
    toka *other = eng_must_open(eng_model, 2, 64, 1);
    got = eng_ask(other, eng_problem, NULL, 0, 1, &s, &code, &e);
    CHECK(code == TOKA_E_USE && strstr(e.msg, "another model"));
    eng_collected_free(got);
    toka_close(other), toka_close(t);
    toka_constraint_del(same), toka_constraint_del(s.constraint);
    toka_constraint_del(NULL);
}

/* ---- Workers ---- */

enum { WORK_REQUESTS = 9, WORK_SAMPLES = SANITIZED ? 4 : 7 };

typedef struct work_holder { /* a thread that takes one constraint after the other for a moment, as a slow mask would */
    eng *engine;
    toka_constraint *constraints[WORK_REQUESTS];
    atomic_bool stop;
} work_holder;

static void work_take(eng_workers *w, toka_constraint *c) {
    pthread_mutex_lock(&w->lock);
    while (c->taken) pthread_cond_wait(&w->released, &w->lock);
    c->taken = true;
    pthread_mutex_unlock(&w->lock);
}
static void work_release(eng_workers *w, toka_constraint *c) {
    pthread_mutex_lock(&w->lock);
    eng_release_constraint(w, c);
    pthread_mutex_unlock(&w->lock);
}
static void *work_hold(void *arg) {
    work_holder *h = arg;
    for (int i = 0; !atomic_load(&h->stop); i++) {
        toka_constraint *c = h->constraints[i % WORK_REQUESTS];
        if (!c) continue;
        work_take(&h->engine->workers, c);
        usleep(200 + 300 * (unsigned)(i % 5));
        work_release(&h->engine->workers, c);
        usleep(200);
    }
    return NULL;
}

/* Requests with constraints of all kinds, two of them with the same one, and some without. Every fourth is cancelled on the way. */
static void work_ask(toka *t, eng_collected **got, bool slow) {
    work_holder holder = {.engine = t->engine};
    pthread_t thread;
    toka_err e;
    int64_t id;
    for (int i = 0; i < WORK_REQUESTS; i++) {
        toka_request r = toka_request_default();
        const char *text = i < 5 ? con_walks[i] : i == 5 ? "[\"one\",\"one more\",\"two\"]" : con_walks[0];
        const toka_grammar g = {.kind = i == 5 ? CH : JS, .text = text, .text_bytes = strlen(text)};
        r.text = eng_problem, r.text_bytes = strlen(eng_problem), r.n = WORK_SAMPLES;
        r.sampling.max_tokens = SANITIZED ? 20 : 40, r.sampling.temperature = 1.5f, r.sampling.seed = (uint64_t)i, r.sampling.logprobs = 1;
        if (i != 7) CHECK_MSG(!toka_constraint_new(&r.sampling.constraint, t, &g, &e), "%s", e.msg);
        holder.constraints[i] = r.sampling.constraint;
        got[i] = mem_zalloc(sizeof **got);
        got[i]->cancel_after = i % 4 == 3 ? WORK_SAMPLES * 4 * i / 3 : 0;
        CHECK(!toka_submit(t, &r, eng_collect, got[i], &id, &e));
    }
    if (slow) CHECK(!os_thread_start(&thread, work_hold, &holder, &e));
    CHECK_MSG(!toka_run(t, 0, &e), "%s", e.msg);
    atomic_store(&holder.stop, true);
    if (slow) pthread_join(thread, NULL);
    for (int i = 0; i < WORK_REQUESTS; i++) toka_constraint_del(holder.constraints[i]);
}

/* Neither the number of workers, nor slow masks, nor preemption, nor steps in flight change a token. */
static void test_con_workers(void) {
    static const struct { const char *workers; int n_ahead, dp, kv_tokens; bool late, slow; } cases[] = {
        {"1", 1, 1, 0, false, false}, {"1", 2, 1, 192, true, false}, {"2", 2, 1, 320, false, true}, {"8", 2, 1, 0, true, true},
        {"3", 1, 2, 192, false, true}, {"8", 3, 1, 192, true, true}};
    eng_collected *want[WORK_REQUESTS] = {0}, *got[WORK_REQUESTS];
    int64_t preempted = 0, late = 0;
    for (int k = 0; k < COUNT(cases); k++) {
        toka_options o = toka_options_default();
        if (SANITIZED && k % 2 && k + 1 < COUNT(cases)) continue;
        o.model = eng_model, o.n_threads = 1, o.max_num_seqs = 40, o.max_num_batched_tokens = 60, o.max_model_len = 160;
        o.data_parallel_size = cases[k].dp, o.kv_tokens = cases[k].kv_tokens;
        setenv("TOKA_DEBUG_WORKERS", cases[k].workers, 1);
        toka *t = eng_open_ahead(o, cases[k].n_ahead, cases[k].late);
        for (int i = 0; i < t->engine->n_replicas && o.kv_tokens; i++) t->engine->replicas[i].sched.config.reserve_steps = 0;
        work_ask(t, k ? got : want, cases[k].slow);
        CHECK(t->engine->workers.n_threads == atoi(cases[k].workers) && !t->engine->workers.n_readings && !t->engine->n_active);
        for (int i = 0; i < WORK_REQUESTS && k; i++) {
            CHECK_MSG(got[i]->n_ended == WORK_SAMPLES, "case %d, request %d", k, i);
            for (int j = 0; j < WORK_SAMPLES; j++) {
                const ids a = want[i]->id[j], b = got[i]->id[j];
                const size_t n = MIN(a.n, b.n);
                CHECK_MSG((want[i]->cancel_after || a.n == b.n) && (!n || !memcmp(a.p, b.p, n * sizeof *a.p)), "case %d, request %d, sample %d", k, i, j);
                CHECK(!n || !memcmp(want[i]->logprob[j], got[i]->logprob[j], n * sizeof(float)));
                CHECK(want[i]->cancel_after || want[i]->finish[j] == got[i]->finish[j]);
            }
            eng_collected_free(got[i]);
        }
        const toka_stats stats = toka_get_stats(t);
        preempted += stats.preemptions, late += stats.masks_late;
        CHECK(stats.masks > 200 && stats.masks_made > 10 && stats.masks_made < stats.masks && stats.mask_s > 0 && !stats.kv_pages_used);
        for (int i = 0; i < t->engine->n_replicas; i++) CHECK(!sched_check(&t->engine->replicas[i].sched) && !t->engine->replicas[i].n_reading);
        toka_close(t);
    }
    for (int i = 0; i < WORK_REQUESTS; i++) eng_collected_free(want[i]);
    unsetenv("TOKA_DEBUG_WORKERS");
    CHECK_MSG(preempted > 10 && (SANITIZED || late > 0), "%d preempted, %d late", (int)preempted, (int)late);
}

static void *work_drive(void *arg) {
    toka_err e;
    return toka_run(arg, 0, &e) ? arg : NULL;
}

/* A row whose mask is not ready waits. No other row does, and it can be cancelled. */
static void test_con_slow_mask(void) {
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    static const char *const texts[] = {"a{30}", "b{30}", NULL};
    eng_collected *got[3];
    toka_constraint *constraints[3] = {0};
    toka_err e;
    int64_t id[3];
    pthread_t thread;
    void *failed;
    setenv("TOKA_DEBUG_WORKERS", "1", 1);
    for (int i = 2; i >= 0; i--) {
        toka_request r = toka_request_default();
        const toka_grammar g = {.kind = RE, .text = texts[i], .text_bytes = 5};
        r.text = eng_problem, r.text_bytes = strlen(eng_problem), r.n = 2, r.sampling.max_tokens = 12, r.sampling.ignore_eos = 1;
        if (g.text) CHECK_MSG(!toka_constraint_new(&constraints[i], t, &g, &e), "%s", e.msg);
        r.sampling.constraint = constraints[i];
        got[i] = mem_zalloc(sizeof **got);
        CHECK(!toka_submit(t, &r, eng_collect, got[i], &id[i], &e));
    }
    work_take(&t->engine->workers, constraints[0]);
    CHECK(!os_thread_start(&thread, work_drive, t, &e));
    while (toka_get_stats(t).requests_done < 2) usleep(1000);
    CHECK_MSG(!got[0]->n_events && toka_get_stats(t).masks_late >= 2, "%d late", (int)toka_get_stats(t).masks_late); /* others may be late under load */
    toka_cancel(t, id[0]);
    work_release(&t->engine->workers, constraints[0]);
    pthread_join(thread, &failed);
    CHECK(!failed && got[1]->n_ended == 2 && got[2]->n_ended == 2 && got[0]->n_ended == 2 && got[1]->id[0].n && got[2]->id[1].n == 12);
    for (int i = 0; i < 3; i++) eng_collected_free(got[i]), toka_constraint_del(constraints[i]);
    unsetenv("TOKA_DEBUG_WORKERS");
    toka_close(t);
}

/* A sequence is preempted while its token is read, and draws it again before it was read. */
static void test_con_preempted_reader(void) {
    toka *t = eng_must_open(eng_model, 4, 64, 1);
    const toka_grammar g = {.kind = RE, .text = "([ab]{3} )*", .text_bytes = 11};
    toka_request r = toka_request_default();
    eng_workers *w = &t->engine->workers;
    scheduler *sched = &t->engine->replicas[0].sched;
    eng_collected *got = mem_zalloc(sizeof *got);
    toka_err e;
    int64_t id;
    int code;
    CHECK_MSG(!toka_constraint_new(&r.sampling.constraint, t, &g, &e), "%s", e.msg);
    r.text = eng_problem, r.text_bytes = strlen(eng_problem), r.sampling.max_tokens = 30, r.sampling.ignore_eos = 1, r.sampling.temperature = 2;
    eng_collected *want = eng_ask(t, eng_problem, NULL, 0, 1, &r.sampling, &code, &e);
    CHECK(!toka_submit(t, &r, eng_collect, got, &id, &e));
    for (int i = 0; i < 5; i++) eng_step(t->engine);
    for (; w->n_readings; eng_commit_all_read(t->engine)) usleep(100);
    work_take(w, r.sampling.constraint);
    for (int i = 0; i < 5 && w->n_readings < 1; i++) eng_step(t->engine);
    sched_preempt(sched);
    for (int i = 0; i < 9 && w->n_readings < 2; i++) eng_step(t->engine);
    CHECK(w->n_readings == 2 && !sched_check(sched));
    work_release(w, r.sampling.constraint);
    CHECK(!toka_run(t, 0, &e) && got->n_ended == 1);
    CHECK(got->id[0].n == want->id[0].n && !memcmp(got->id[0].p, want->id[0].p, got->id[0].n * sizeof(int32_t)));
    eng_collected_free(want), eng_collected_free(got), toka_constraint_del(r.sampling.constraint);
    toka_close(t);
}

static const toka_grammar work_letters = {.kind = RE, .text = "[^x]*", .text_bytes = 5};

/* Runs n_plain requests without a constraint and n_masked with one, each of 3 samples of 30 tokens. Returns the steps. */
static int64_t work_count_steps(int n_ahead, bool late, int n_plain, int n_masked, int64_t *n_late) {
    toka_options o = toka_options_default();
    o.model = eng_model, o.n_threads = 1, o.max_num_seqs = 24, o.max_num_batched_tokens = 100, o.max_model_len = 160;
    toka *t = eng_open_ahead(o, n_ahead, late);
    toka_constraint *constraint;
    eng_collected *got[4];
    toka_err e;
    int64_t id;
    CHECK_MSG(!toka_constraint_new(&constraint, t, &work_letters, &e), "%s", e.msg);
    for (int i = 0; i < n_plain + n_masked; i++) {
        toka_request r = toka_request_default();
        r.text = eng_problem, r.text_bytes = strlen(eng_problem), r.n = 3;
        r.sampling.max_tokens = 30, r.sampling.ignore_eos = 1, r.sampling.seed = (uint64_t)i;
        if (i >= n_plain) r.sampling.constraint = constraint;
        got[i] = mem_zalloc(sizeof **got);
        CHECK(!toka_submit(t, &r, eng_collect, got[i], &id, &e));
    }
    CHECK_MSG(!toka_run(t, 0, &e), "%s", e.msg);
    const toka_stats stats = toka_get_stats(t);
    for (int i = 0; i < n_plain + n_masked; i++) {
        for (int j = 0; j < 3; j++) CHECK(got[i]->id[j].n == 30);
        eng_collected_free(got[i]);
    }
    *n_late = stats.masks_late;
    toka_constraint_del(constraint), toka_close(t);
    return stats.steps;
}

/* Rows with a constraint are planned ahead: they take as many steps as others, alone and beside them. Only a late mask costs one. */
static void test_con_steps(void) {
    static const struct { int n_ahead, n_plain, n_masked; bool late; } cases[] = {{1, 0, 3, false}, {2, 0, 3, false}, {2, 2, 2, false}, {2, 0, 3, true}, {2, 1, 3, true}};
    for (int k = 0; k < COUNT(cases); k++) {
        int64_t n_late = 1, n_steps = 0;
        const int n = cases[k].n_plain + cases[k].n_masked;
        const int64_t want = work_count_steps(cases[k].n_ahead, cases[k].late, n, 0, &n_late);
        CHECK(!n_late);
        n_late = 1;
        for (int i = 0; i < 20 && n_late; i++) { /* a busy machine may be late */
            n_steps = work_count_steps(cases[k].n_ahead, cases[k].late, cases[k].n_plain, cases[k].n_masked, &n_late);
            CHECK_MSG(n_steps >= want && (n_late || n_steps == want), "case %d: %d steps, expected %d", k, (int)n_steps, (int)want);
        }
        CHECK_MSG(!n_late, "case %d: %d masks are always late", k, (int)n_late);
    }
}

/* Is a step held, of which the device runs the body? */
static bool work_is_held(toka *t) {
    eng_replica *replica = &t->engine->replicas[0];
    for (int i = 0; i < replica->n_in_flight; i++)
        if (replica->inflight[(replica->oldest + i) % replica->max_in_flight].is_held) return true;
    return false;
}

/* While a step is held, its requests are cancelled, the engine is closed, or the device fails: each sample ends once. */
static void test_con_held(void) {
    enum { CANCEL, CLOSE, FAULT, ENDS };
    int n_held = 0;
    for (int k = 0; k < 20 * ENDS; k++) {
        const int how = k % ENDS, n_steps = k / ENDS / 2, late = k / ENDS % 2;
        toka_options o = toka_options_default();
        o.model = eng_model, o.n_threads = 1, o.max_num_seqs = 8, o.max_num_batched_tokens = 40, o.max_model_len = 160;
        toka *t = eng_open_ahead(o, 2, late);
        toka_backend failing;
        toka_constraint *constraint;
        eng_collected *got[2];
        int64_t id[2];
        toka_err e = {0};
        CHECK_MSG(!toka_constraint_new(&constraint, t, &work_letters, &e), "%s", e.msg);
        for (int i = 0; i < 2; i++) {
            toka_request r = toka_request_default();
            r.text = eng_problem, r.text_bytes = strlen(eng_problem), r.n = 2, r.sampling.max_tokens = 30, r.sampling.ignore_eos = 1;
            if (!i) r.sampling.constraint = constraint;
            got[i] = mem_zalloc(sizeof **got);
            CHECK(!toka_submit(t, &r, eng_collect, got[i], &id[i], &e));
        }
        if (how == FAULT && !late) { /* before a step that runs on this thread's engine */
            failing = toka_cpu, failing.status = eng_faulty_status, eng_steps_left = 2 * n_steps + k % 2;
            t->engine->replicas[0].model.backend = &failing;
        }
        for (int i = 0; i < n_steps; i++) eng_step(t->engine);
        n_held += work_is_held(t);
        if (how == CANCEL) {
            toka_cancel(t, id[0]);
            CHECK_MSG(!toka_run(t, 0, &e), "%s", e.msg);
            CHECK(got[0]->n_ended == 2 && got[1]->n_ended == 2 && got[1]->id[1].n == 30);
        } else if (how == FAULT && !late) {
            const int code = toka_run(t, 0, &e);
            CHECK_MSG(code == TOKA_E_DEVICE && strstr(e.msg, "injected"), "%d: %s", code, e.msg);
        }
        toka_close(t);
        CHECK(got[0]->n_ended == 2 && got[1]->n_ended == 2);
        for (int i = 0; i < 2; i++) eng_collected_free(got[i]);
        toka_constraint_del(constraint);
    }
    CHECK_MSG(n_held > 20, "%d", n_held);
}

/* Tokens that a mask forces take no step of their own, and change nothing. */
static void test_con_forced(void) {
    static const char *const stop[] = {"!~! "};
    static const int32_t bad[] = {4}, one[] = {1};
    enum { KINDS = 6, N = 5 };
    eng_collected *want[KINDS];
    int64_t n_steps = 0, n_forced = 0;
    for (int k = 0; k < 4; k++) {
        toka_options o = toka_options_default();
        o.model = eng_model, o.n_threads = 1, o.max_num_seqs = 24, o.max_num_batched_tokens = 40, o.max_model_len = 160, o.kv_tokens = k > 1 ? 192 : 0;
        toka *t = eng_open_ahead(o, k == 3 ? 2 : 1, k == 3);
        ((toka_backend *)t->engine->backend)->has_drafts = k;
        if (o.kv_tokens) t->engine->replicas[0].sched.config.reserve_steps = 0;
        eng_collected *got[KINDS];
        toka_constraint *constraint;
        toka_err e;
        int64_t id;
        const toka_grammar g = {.kind = RE, .text = "([abc]~!~!~!~!~!~!~! )*", .text_bytes = 23};
        CHECK_MSG(!toka_constraint_new(&constraint, t, &g, &e), "%s", e.msg);
        for (int i = 0; i < KINDS; i++) {
            toka_request r = toka_request_default();
            toka_sampling *s = &r.sampling;
            r.text = eng_problem, r.text_bytes = strlen(eng_problem), r.n = N;
            s->max_tokens = 40 + i, s->temperature = 1.5f, s->seed = (uint64_t)i, s->logprobs = 2, s->constraint = constraint;
            if (i == 1) s->stop = stop, s->n_stop = 1, s->min_tokens = 12;
            if (i == 2) s->repetition_penalty = 1.5f, s->frequency_penalty = 1, s->min_tokens = 30;
            if (i == 3) s->bad_ids = bad, s->bad_lengths = one, s->n_bad = 1, s->ignore_eos = 1;
            if (i == 4) s->constraint = NULL;
            if (i == 5) s->max_tokens = 6, s->ignore_eos = 1;
            got[i] = mem_zalloc(sizeof **got);
            CHECK(!toka_submit(t, &r, eng_collect, got[i], &id, &e));
        }
        CHECK_MSG(!toka_run(t, 0, &e), "%s", e.msg);
        for (int i = 0; i < KINDS; i++)
            for (int j = 0; j < N && k; j++) {
                const ids a = want[i]->id[j], b = got[i]->id[j];
                CHECK_MSG(a.n == b.n && (!a.n || !memcmp(a.p, b.p, a.n * sizeof *a.p)), "case %d, request %d, sample %d: %zu and %zu", k, i, j, a.n, b.n);
                CHECK(!a.n || (!memcmp(want[i]->logprob[j], got[i]->logprob[j], a.n * sizeof(float)) && !memcmp(want[i]->sampled[j], got[i]->sampled[j], a.n * sizeof(float))));
                CHECK(want[i]->finish[j] == got[i]->finish[j] && str_eq(buf_view(&want[i]->text[j]), buf_view(&got[i]->text[j])));
            }
        const toka_stats stats = toka_get_stats(t);
        if (!k) n_steps = stats.steps;
        CHECK(k || (!stats.forced_tokens && !stats.preemptions));
        if (k == 1) CHECK_MSG(stats.forced_tokens > 100 && stats.steps < n_steps, "%d forced, %d steps, without %d", (int)stats.forced_tokens, (int)stats.steps, (int)n_steps);
        if (k > 1) CHECK(stats.preemptions > 0 && stats.forced_tokens > 20);
        n_forced += stats.forced_tokens;
        CHECK(!stats.drafts && !stats.kv_pages_used && !sched_check(&t->engine->replicas[0].sched));
        toka_constraint_del(constraint), toka_close(t);
        for (int i = 0; i < KINDS; i++)
            if (k) eng_collected_free(got[i]);
            else want[i] = got[i];
    }
    CHECK(n_forced > 300);
    for (int i = 0; i < KINDS; i++) eng_collected_free(want[i]);
}

/* Drafts from texts of samples with a constraint: some are right, some are not, some does the mask refuse; none changes anything. */
static void test_con_guesses(void) {
    static const char ngram[] = "{\"method\":\"ngram\",\"num_speculative_tokens\":5,\"prompt_lookup_max\":3,\"prompt_lookup_min\":1}";
    static const char suffix[] = "{\"method\":\"suffix\",\"num_speculative_tokens\":16}";
    static const struct {
        const char *config;
        int n_ahead, dp, pp, kv_tokens;
        bool late;
    } cases[] = {{NULL, 1, 1, 1, 0, false}, {ngram, 1, 1, 1, 0, false}, {ngram, 2, 1, 1, 192, true}, {suffix, 2, 1, 1, 0, true}, {suffix, 4, 2, 2, 192, false}};
    static const char *const stop[] = {"aab"};
    static const int32_t bad[] = {4}, one[] = {1};
    enum { KINDS = 6, N = 3 };
    eng_collected *want[KINDS];
    int64_t n_right = 0, n_wrong = 0, n_forced = 0, n_preempted = 0;
    for (int k = 0; k < COUNT(cases); k++) {
        toka_options o = toka_options_default();
        o.model = eng_model, o.n_threads = 1, o.max_num_seqs = 24, o.max_num_batched_tokens = 40, o.max_model_len = 160, o.kv_tokens = cases[k].kv_tokens;
        o.speculative_config = cases[k].config, o.data_parallel_size = cases[k].dp, o.pipeline_parallel_size = cases[k].pp;
        toka *t = eng_open_ahead(o, cases[k].n_ahead, cases[k].late);
        for (int i = 0; i < t->engine->n_replicas; i++) {
            t->engine->replicas[i].drafts.config.always = true;
            if (o.kv_tokens) t->engine->replicas[i].sched.config.reserve_steps = 0;
        }
        eng_collected *got[KINDS];
        toka_constraint *free_text, *letters;
        toka_err e;
        int64_t id;
        const toka_grammar g = {.kind = RE, .text = "([ab ]{3,30}(~!~!)?[0-9], )*", .text_bytes = 28}, h = {.kind = RE, .text = "[ab]*", .text_bytes = 5};
        CHECK_MSG(!toka_constraint_new(&free_text, t, &g, &e) && !toka_constraint_new(&letters, t, &h, &e), "%s", e.msg);
        for (int i = 0; i < KINDS; i++) {
            toka_request r = toka_request_default();
            toka_sampling *s = &r.sampling;
            r.text = eng_problem, r.text_bytes = strlen(eng_problem), r.n = N;
            s->max_tokens = 32 + i, s->temperature = i % 3 ? 0.7f : 0, s->seed = (uint64_t)i, s->logprobs = 2, s->constraint = i % 2 ? free_text : letters;
            if (i == 1) s->stop = stop, s->n_stop = 1, s->min_tokens = 12;
            if (i == 2) s->repetition_penalty = 1.2f, s->frequency_penalty = 0.1f, s->min_tokens = 30;
            if (i == 3) s->bad_ids = bad, s->bad_lengths = one, s->n_bad = 1, s->ignore_eos = 1;
            if (i == 4) s->constraint = NULL;
            if (i == 5) s->top_k = 3, s->ignore_eos = 1;
            got[i] = mem_zalloc(sizeof **got);
            CHECK(!toka_submit(t, &r, eng_collect, got[i], &id, &e));
        }
        CHECK_MSG(!toka_run(t, 0, &e), "%s", e.msg);
        for (int i = 0; i < KINDS; i++)
            for (int j = 0; j < N && k; j++) {
                const ids a = want[i]->id[j], b = got[i]->id[j];
                CHECK_MSG(a.n == b.n && (!a.n || !memcmp(a.p, b.p, a.n * sizeof *a.p)), "case %d, request %d, sample %d: %zu and %zu", k, i, j, a.n, b.n);
                CHECK(!a.n || (!memcmp(want[i]->logprob[j], got[i]->logprob[j], a.n * sizeof(float)) && !memcmp(want[i]->sampled[j], got[i]->sampled[j], a.n * sizeof(float))));
                CHECK(want[i]->finish[j] == got[i]->finish[j] && str_eq(buf_view(&want[i]->text[j]), buf_view(&got[i]->text[j])));
            }
        const toka_stats stats = toka_get_stats(t);
        CHECK((stats.drafts > 0) == (k > 0));
        n_right += stats.draft_tokens_accepted, n_wrong += stats.draft_tokens - stats.draft_tokens_accepted;
        n_forced += stats.forced_tokens, n_preempted += stats.preemptions;
        CHECK(!stats.kv_pages_used && !t->engine->n_active);
        for (int i = 0; i < t->engine->n_replicas; i++) CHECK(!sched_check(&t->engine->replicas[i].sched));
        toka_constraint_del(free_text), toka_constraint_del(letters), toka_close(t);
        for (int i = 0; i < KINDS; i++)
            if (k) eng_collected_free(got[i]);
            else want[i] = got[i];
    }
    CHECK_MSG(n_right > 300 && n_wrong > 300 && n_forced > 20 && n_preempted > 0, "%d right, %d wrong, %d forced, %d preempted", (int)n_right, (int)n_wrong, (int)n_forced, (int)n_preempted);
    for (int i = 0; i < KINDS; i++) eng_collected_free(want[i]);
}

/* A sample with a constraint that repeats itself takes fewer steps by drafts. */
static void test_con_guess_steps(void) {
    int64_t n_steps[2];
    ids text[2] = {0};
    for (int k = 0; k < 2; k++) {
        toka_options o = toka_options_default();
        o.model = eng_model, o.n_threads = 1, o.max_num_seqs = 1, o.max_model_len = 160, o.num_speculative_tokens = 6 * k;
        toka *t = eng_open_ahead(o, 2, false);
        toka_request r = toka_request_default();
        toka_err e;
        const toka_grammar g = {.kind = RE, .text = "[ab]*", .text_bytes = 5};
        eng_collected *got = mem_zalloc(sizeof *got);
        CHECK(!toka_constraint_new(&r.sampling.constraint, t, &g, &e));
        r.text = eng_problem, r.text_bytes = strlen(eng_problem), r.sampling.max_tokens = 80, r.sampling.temperature = 0, r.sampling.ignore_eos = 1;
        t->engine->replicas[0].drafts.config.always = k; /* else times decide */
        CHECK(!toka_generate(t, &r, eng_collect, got, NULL, &e) && got->n_ended == 1);
        n_steps[k] = toka_get_stats(t).steps;
        for (size_t i = 0; i < got->id[0].n; i++) ids_push(&text[k], got->id[0].p[i]);
        eng_collected_free(got), toka_constraint_del(r.sampling.constraint), toka_close(t);
    }
    CHECK(text[0].n == text[1].n && !memcmp(text[0].p, text[1].p, text[0].n * sizeof *text[0].p));
    CHECK_MSG(n_steps[1] * 2 < n_steps[0], "%d steps, %d without drafts", (int)n_steps[1], (int)n_steps[0]);
    ids_free(&text[0]), ids_free(&text[1]);
}

static const struct test con_tests[] = {
    {"constraints: texts", test_con_texts},
    {"constraints: a pattern that has matched", test_con_matched},
    {"constraints: few items read much", test_con_few_items},
    {"constraints: options of JSON", test_con_options},
    {"constraints: errors", test_con_errors},
    {"constraints: listed names", test_con_listed_names},
    {"constraints: limits", test_con_limits},
    {"constraints: masks are what each token says", test_con_masks},
    {"constraints: enums of 20,000 values", test_con_large_enums},
    {"constraints: long lists take little time", test_con_long_lists},
    {"constraints: rows with a mask", test_con_rows},
    {"constraints: added tokens", test_con_added_tokens},
    {"constraints: the end of thinking", test_con_thinking},
    {"constraints: requests", test_con_requests},
    {"constraints: ranks", test_con_ranks},
    {"constraints: hostile grammars are stopped", test_con_stop},
    {"constraints: no token is left", test_con_none_left},
    {"constraints: workers change no token", test_con_workers},
    {"constraints: only the row of a slow mask waits", test_con_slow_mask},
    {"constraints: forced tokens take no step", test_con_forced},
    {"constraints: guesses change nothing", test_con_guesses},
    {"constraints: guesses save steps", test_con_guess_steps},
    {"constraints: preempted while a token is read", test_con_preempted_reader},
    {"constraints: rows with masks are planned ahead", test_con_steps},
    {"constraints: the end of a held step", test_con_held},
    {NULL, NULL}};
