//! Tests of programs: text, types, values, and the bands of masks.

use flashcore_problem::program::{Input, Op, Point, Precision, Range, Value, library as lib};
use flashcore_problem::{
    Band, Corner, DType, ElementType, Elements, Expr, Layout, Problem, Program, Programs, Table,
};

const TEXTS: [&str; 12] = [
    "s",
    "s - t0[b, h] * float(abs(q + k_len - q_len - k))",
    "(q + k_len - q_len >= k) & (k >= 3)",
    "(q >= k) & (q - k < i0) | (k < 2)",
    "select(q == k, s * 2.5, -inf)",
    "d = q - k; (d * d <= 9) & (d != -2)",
    "n0[min(q, 3), 0] == n0[max(k - 1, 0), 0]",
    "(q / 3 == k / 3) & (q % 4 < 2)",
    "(q << 2 ^ k) >> 1 & 1 == 0",
    "tanh(s / f0) * f0 + exp2(log2(sqrt(1.5e2)))",
    "!(q > k) & true",
    "-s + float(-q) * -0.5",
];

fn parse(text: &str) -> Program {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn value(program: &Program, programs: &Programs, tables: &[Elements<'_>], point: Point) -> Value {
    let value = program.evaluate(programs, tables, &point, Precision::Exact, &mut Vec::new());
    // In its row, the program has the same value, whichever key and score came before.
    let before = Point { key: point.key + 1, score: point.score + 1.0, ..point };
    let mut row = program.in_row(programs, tables, before, Precision::Exact);
    row.evaluate(point.key + 2, 2.0 - point.score);
    assert_eq!(format!("{:?}", row.evaluate(point.key, point.score)), format!("{value:?}"));
    value
}

/// The parameters and tables that the texts use.
fn programs() -> Programs {
    Programs {
        floats: vec![7.5],
        ints: vec![4],
        tables: vec![Table::dense(ElementType::F32, &[2, 3])],
        ..Programs::default()
    }
}

#[test]
fn text_is_read_as_it_is_written() {
    for text in TEXTS {
        let program = parse(text);
        let written = program.to_string();
        assert_eq!(parse(&written), program, "{text} as {written}");
        let json = serde_json::to_string(&program).unwrap();
        assert_eq!(serde_json::from_str::<Program>(&json).unwrap(), program);
    }
}

#[test]
fn an_operation_that_is_read_twice_is_stored_and_written_once() {
    let level = lib::level();
    let program = Program::new(&(level.clone() - lib::key()).le(level.clone() * level)).unwrap();
    let text = program.to_string();
    assert_eq!(text.matches("k_len").count(), 1, "{text}");
    // Sixty doublings of a shared expression would need 2^60 operations if sharing were lost.
    let doubled = (0..60).fold(lib::score(), |x, _| x.clone() + x);
    let program = Program::new(&doubled).unwrap();
    assert_eq!(program.ops().len(), 61);
    assert_eq!(parse(&program.to_string()), program);
}

#[test]
fn operators_bind_as_in_python() {
    let program = |text: &str| parse(text);
    assert_eq!(program("q + k * 2 == b - h - 1"), program("(q + (k * 2)) == ((b - h) - 1)"));
    assert_eq!(program("q < k & 3"), program("q < (k & 3)"));
    assert_eq!(program("q | k ^ b & h << 1 + 2"), program("q | (k ^ (b & (h << (1 + 2))))"));
    assert_eq!(program("-q * k"), program("(-q) * k"));
}

#[test]
fn a_minus_negates_whatever_follows() {
    let of = |text: &str| value(&parse(text), &Programs::default(), &[], Point::default());
    assert_eq!(of("-inf"), Value::Float(f64::NEG_INFINITY));
    assert_eq!(of("-(inf)"), Value::Float(f64::NEG_INFINITY));
    assert_eq!((of("-(5)"), of("-5"), of("--5")), (Value::Int(-5), Value::Int(-5), Value::Int(5)));
    assert_eq!(of("n = 2.5; -n"), Value::Float(-2.5));
    let infinite = Program::new(&Expr::from(f32::NEG_INFINITY)).unwrap();
    assert_eq!(parse(&infinite.to_string()), infinite);
}

#[test]
fn an_input_is_replaced_everywhere() {
    let twice = lib::score() * lib::score() + lib::query();
    let with = twice.replace(flashcore_problem::program::Input::Score, &(lib::key() + 1));
    assert_eq!(Program::new(&with).unwrap(), parse("(k + 1) * (k + 1) + q"));
}

#[test]
fn integers_divide_as_in_python() {
    let none = Programs::default();
    for (a, b, quotient, rest) in
        [(7, 2, 3, 1), (-7, 2, -4, 1), (7, -2, -4, -1), (-7, -2, 3, -1), (6, -2, -3, 0), (5, 0, 0, 0)]
    {
        let of = |op: &str| value(&parse(&format!("({a}) {op} ({b})")), &none, &[], Point::default());
        assert_eq!((of("/"), of("%")), (Value::Int(quotient), Value::Int(rest)), "{a} {b}");
    }
    assert_eq!(value(&parse("1 << 40"), &none, &[], Point::default()), Value::Int(0));
    assert_eq!(value(&parse("-5 >> 40"), &none, &[], Point::default()), Value::Int(-1));
}

#[test]
fn an_index_outside_a_table_reads_the_nearest_element() {
    let programs = programs();
    let data = [0.0, 1.0, 2.0, 10.0, 11.0, 12.0];
    for (text, expected) in [("t0[1, 1]", 11.0), ("t0[-3, 9]", 2.0), ("t0[5, -1]", 10.0)] {
        assert_eq!(
            value(&parse(text), &programs, &[Elements::F32(&data)], Point::default()),
            Value::Float(expected),
            "{text}"
        );
    }
}

#[test]
fn faults_are_named() {
    for (text, message) in [
        ("q +", "at column 4: expected a number, s, q, k"),
        ("q k", "at column 3: expected an operator or the end"),
        ("min(q)", "2 arguments of min, not 1"),
        ("q + (k > 1)", "+ takes two values of one type, not an int and a bool"),
        ("s % 2.0", "% takes ints, not float"),
        ("s & true", "& takes two values of one type"),
        ("t0[s]", "an index of a table takes an int, not float"),
        ("99999999999", "an integer of 32 bits or a float"),
        ("select(q, 1, 2)", "the condition of select takes a bool, not int"),
    ] {
        let error = text.parse::<Program>().unwrap_err().to_string();
        assert!(error.contains(message), "{text}: {error}");
    }
    let deep = "(".repeat(1000) + "q" + &")".repeat(1000);
    assert!(deep.parse::<Program>().unwrap_err().to_string().contains("200 levels"));
}

#[test]
fn problems_refuse_programs_that_do_not_fit() {
    let check = |score: Option<&str>, mask: Option<&str>, tables: Vec<Table>| {
        let mut p = Problem::new(2, 3, 8, 16, DType::F16);
        p.programs = Programs { score: score.map(parse), mask: mask.map(parse), tables, ..programs() };
        p.check().map_err(|error| error.to_string())
    };
    let table = |extents: &[usize]| vec![Table::dense(ElementType::F32, extents)];
    check(Some("s + t0[b, h]"), Some("q >= k"), table(&[2, 3])).unwrap();
    for (score, mask, tables, message) in [
        (Some("q"), None, vec![], "its result is an int; expected a float"),
        (None, Some("s > 0.0"), vec![], "a mask cannot read the score"),
        (Some("s + f3"), None, vec![], "the program reads float parameter 3 (f3), but 1 was given"),
        (Some("s + t0[h]"), None, vec![], "the program reads table 0 (t0), but 0 were given"),
        (Some("s + t0[h]"), None, table(&[2, 3]), "t0 has 2 dimensions and is read with 1 indices"),
        (Some("s + t0[h]"), None, table(&[2]), "it reads t0 at 0 to 2 in dimension 0, which has 2 elements"),
        (None, Some("n0[h] == 0"), table(&[3]), "t0 holds"),
        (Some("s"), None, table(&[0]), "expected 1 to 2^31 - 1 each"),
    ] {
        let error = check(score, mask, tables).unwrap_err();
        assert!(error.contains(message) || error.contains("n0 holds"), "{error}");
    }
}

/// A position beyond 32 bits would wrap. Strides of 0 allow so many keys.
#[test]
fn positions_have_32_bits() {
    let mut p = Problem::new(1, 1, 4, 16, DType::F16);
    (p.seq_kv, p.k.row, p.v.row) = (1 << 40, 0, 0);
    p.check().unwrap();
    p.programs.mask = Some(parse("k * k >= q"));
    let told = "invalid mask program: invalid value '1099511627776' for seq_kv: expected at most 2^31 - 1, \
                since positions of programs are 32-bit integers";
    assert_eq!(p.check().unwrap_err().to_string(), told);
}

/// The band and the rest of every split mask show the same keys as the mask, with more queries than keys and
/// with fewer.
#[test]
fn the_bounds_of_a_mask_become_a_band() {
    let masks = [
        ("q >= k", true),
        ("q + k_len - q_len >= k", true),
        ("(k <= q) & (q - k < 3)", true),
        ("k > q - 4", true),
        ("(q - k <= i0) & (k - q <= 1)", true),
        ("q > k", false),
        ("(q >= k) & (q + k_len - q_len >= k)", true),
        ("(q >= k) & ((q / 2 == k / 2) | (k == 0))", true),
        ("q >= 2 * k", false),
        ("(q >= k) | (k < 2)", false),
        ("true & (q >= k)", true),
        ("q * 1 - -1 > k", true),
    ];
    for (text, found) in masks {
        for (seq_q, seq_kv) in [(5, 5), (3, 7), (7, 3)] {
            for band in [Band::FULL, Band::window(2, 1), Band::window(2, 1).aligned(Corner::TopLeft)] {
                let mut p = Problem::new(1, 1, seq_q, 16, DType::F16)
                    .with_seq_kv(seq_kv, Layout::Bhsd)
                    .with_band(band);
                p.programs = Programs { mask: Some(parse(text)), ..programs() };
                let (narrow, rest) = p.programs.split_band(&p);
                if band.is_full() {
                    assert_eq!(narrow != band, found, "{text}");
                }
                let sees = |band: Band, mask: Option<&Program>, query, key| {
                    let point =
                        Point { query, key, query_length: seq_q, key_length: seq_kv, ..Point::default() };
                    let keys = band.keys(query, seq_q, seq_kv);
                    (keys.start..keys.end).contains(&key)
                        && mask.is_none_or(|mask| value(mask, &p.programs, &[], point).is_true())
                };
                for (query, key) in (0..seq_q).flat_map(|q| (0..seq_kv).map(move |k| (q, k))) {
                    assert_eq!(
                        sees(band, p.programs.mask.as_ref(), query, key),
                        sees(narrow, rest.as_ref(), query, key),
                        "{text} {band} {narrow} {seq_q} {seq_kv} {query} {key}"
                    );
                }
            }
        }
    }
}

/// Integers wrap in 32 bits. A comparison becomes a bound only if its sides wrap at no position of the
/// problem.
#[test]
fn masks_that_wrap_become_no_band() {
    let (most, least) = (i32::MAX, i32::MIN);
    let (q, k) = (lib::query, lib::key);
    let masks = [
        (q() + most).ge(k()),
        (q() + int_parameter()).ge(k()),
        (k() - q() - most).le(least),
        (q() - k() - least).ge(0),
        (q() * most * most * most).ge(k()),
        (q() * 65536 * 65536).ge(k() - 1),
        (-(q() * least)).ge(k()),
    ];
    for (i, mask) in masks.iter().enumerate() {
        for seq in [1, 4] {
            let mut p = Problem::new(1, 1, seq, 16, DType::F16);
            let mask = Program::new(mask).unwrap();
            p.programs = Programs { mask: Some(mask.clone()), ints: vec![most], ..Programs::default() };
            let (band, rest) = p.programs.split_band(&p);
            for (query, key) in (0..seq).flat_map(|q| (0..seq).map(move |k| (q, k))) {
                let point = Point { query, key, query_length: seq, key_length: seq, ..Point::default() };
                let keys = band.keys(query, seq, seq);
                let split = (keys.start..keys.end).contains(&key)
                    && rest.as_ref().is_none_or(|rest| value(rest, &p.programs, &[], point).is_true());
                let shown = value(&mask, &p.programs, &[], point).is_true();
                assert_eq!(split, shown, "mask {i}, {seq} positions, query {query}, key {key}, {band}");
            }
        }
    }
    // The largest parameter is a usual way to state that there is no bound, and does not wrap here.
    let mut p = Problem::new(1, 1, 4, 16, DType::F16);
    let mask = Program::new(&(q() - k()).le(int_parameter())).unwrap();
    p.programs = Programs { mask: Some(mask), ints: vec![most], ..Programs::default() };
    assert_eq!(p.programs.split_band(&p).0.before, Some(most as u32));
}

fn int_parameter() -> Expr {
    lib::int(0)
}

/// The work on a program grows with its operations, not with the paths through shared expressions.
#[test]
fn shared_expressions_are_visited_once() {
    let (mut sum, mut both) = (lib::query(), lib::query().ge(lib::key()));
    for _ in 0..200 {
        sum = sum.clone() + sum;
        both = both.clone() & both;
    }
    let doubled = sum.ge(lib::key());
    let shown = format!("{doubled:?}");
    assert!(shown.starts_with("Expr(v0 = (q + q); "), "{shown}");
    for mask in [doubled, both] {
        let mut p = Problem::new(1, 1, 4, 16, DType::F16);
        p.programs.mask = Some(Program::new(&mask).unwrap());
        p.canonical();
    }
}

/// Expressions of any depth are built, refused, printed and dropped without recursion.
#[test]
fn a_deep_expression_is_refused_without_recursion() {
    let mut deep = lib::score();
    for _ in 0..200_000 {
        deep = deep + 1.0;
    }
    let told = "the program has 4097 operations: expected at most 4096";
    assert_eq!(Program::new(&deep).unwrap_err().to_string(), told);
    assert_eq!(format!("{:?}", deep.replace(Input::Score, &lib::float(0))), format!("Expr(invalid: {told})"));
}

/// The T5 buckets of `transformers`: exact in the first half, then logarithmic, and shared beyond the
/// farthest distance.
#[test]
fn t5_buckets_grow_with_the_distance() {
    let bias: Vec<f32> = (0..32u8).map(f32::from).collect();
    let programs = Programs { tables: vec![Table::dense(ElementType::F32, &[1, 32])], ..Programs::default() };
    for both in [true, false] {
        let program = Program::new(&lib::t5_bias(0, 32, 128, both)).unwrap();
        for (query, key) in (0..300).flat_map(|q| (0..300).step_by(7).map(move |k| (q, k))) {
            let point = Point { query, key, ..Point::default() };
            let bucket = value(&program, &programs, &[Elements::F32(&bias)], point).float();
            let (side, base, distance) = match (both, key as i64 - query as i64) {
                (true, offset) => (16, if offset > 0 { 16 } else { 0 }, offset.abs()),
                (false, offset) => (32, 0, (-offset).max(0)),
            };
            let exact = side / 2;
            let expected = if distance < exact {
                distance
            } else {
                let far = (distance as f64 / exact as f64).ln() / (128.0 / exact as f64).ln();
                (exact + (far * (side - exact) as f64).floor() as i64).min(side - 1)
            };
            assert_eq!(bucket, (base + expected) as f64, "{both} {query} {key}");
        }
    }
}

#[test]
fn rust_operators_build_the_same_program() {
    let slopes = Expr::load(0, true, [lib::batch(), lib::head()]);
    let built = lib::score() - slopes * (lib::level() - lib::key()).abs();
    assert_eq!(Program::new(&built).unwrap(), parse("s - t0[b, h] * abs(q + k_len - q_len - k)"));
    assert_eq!(Program::new(&lib::alibi(0)).unwrap(), Program::new(&built).unwrap());
}

/// The table in `docs/src/reference/programs.md` shows the expressions of the library.
#[test]
fn the_library_is_what_the_reference_says() {
    let level = "level = q + k_len - q_len; ";
    for (expr, text) in [
        (lib::causal(), "q + k_len - q_len >= k".to_owned()),
        (lib::window(2, 3), format!("{level}(level - k <= 2) & (k - level <= 3)")),
        (lib::chunk(8), format!("{level}(level >= k) & (level / 8 == k / 8)")),
        (lib::prefix(5), "(q + k_len - q_len >= k) | (k < 5)".to_owned()),
        (lib::document(0), "n0[b, q] == n0[b, k]".to_owned()),
        (lib::dilated(4), format!("{level}(level - k) % 4 == 0")),
        (lib::block_diagonal(4), "q / 4 == k / 4".to_owned()),
        (lib::mask_tensor(0), "n0[b, h, q, k] != 0".to_owned()),
        (lib::alibi(0), format!("{level}s - t0[b, h] * abs(level - k)")),
        (lib::bias(0), "s + t0[b, h, q, k]".to_owned()),
        (lib::relative_bias(0, 7), "s + t0[h, q - k + 7]".to_owned()),
    ] {
        assert_eq!(Program::new(&expr).unwrap(), parse(&text), "{text}");
    }
}

/// The range of an operation is computed from measured ranges of earlier operations, as kernels do for a
/// tile.
#[test]
fn ranges_of_a_tile_decide_masks() {
    let decide = |text: &str, query: (i64, i64), key: (i64, i64)| {
        let program = parse(text);
        let mut found = Vec::new();
        for (id, op) in program.ops().iter().enumerate() {
            let of = |(low, high)| Range { low, high, position: true };
            found.push(match op {
                Op::Input(Input::Query) => of(query),
                Op::Input(Input::Key) => of(key),
                _ => program.range(id, &found),
            });
        }
        let result = found[found.len() - 1];
        (result.low, result.high)
    };
    let (no, yes, either) = ((0, 0), (1, 1), (0, 1));
    for (text, query, key, expected) in [
        ("q >= k", (8, 15), (0, 8), yes),
        ("q >= k", (8, 15), (0, 9), either),
        ("q >= k", (8, 15), (16, 20), no),
        ("q / 8 == k / 8", (8, 15), (8, 11), yes),
        ("q / 8 == k / 8", (8, 15), (16, 23), no),
        ("q != k", (0, 3), (4, 7), yes),
        ("(q < 4) & (k > 7)", (0, 3), (8, 9), yes),
        ("(q < 4) | (k > 7)", (4, 5), (0, 7), no),
        ("!((q < 4) ^ (k > 7))", (0, 3), (8, 9), yes),
        ("select(q < 4, k, 7) == 7", (4, 9), (0, 100), yes),
        ("int(q > k) + 1 == 2", (5, 6), (0, 4), yes),
        ("n0[q] == 3", (5, 6), (0, 4), either),
        ("float(q) > 1.0", (5, 6), (0, 4), either),
    ] {
        assert_eq!(decide(text, query, key), expected, "{text} {query:?} {key:?}");
    }
}
