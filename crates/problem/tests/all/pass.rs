//! Tests the passes: how files state them, and which operands, strides and refusals the backward pass has.

use flashcore_problem::{
    DType, ElementType, Gradients, Layout, Operand, Pass, PassKind, Problem, ProblemError, Shape, Strides,
    Table, Tensor,
};
use serde_json::{from_value, json};

/// A file from before passes existed describes a problem without the LSE.
#[test]
fn files_state_the_pass_where_the_lse_is_wanted() {
    let without = Problem::mission();
    let stored = json!(without);
    assert_eq!((without.pass, stored.get("pass")), (Pass::forward(false), None));
    assert_eq!(from_value::<Problem>(stored).unwrap(), without);
    let with = without.with_lse(true);
    let stored = json!(with);
    assert_eq!(stored["pass"], json!({ "forward": { "lse": true } }));
    assert_eq!(from_value::<Problem>(stored).unwrap(), with);
    assert!(with.canonical().pass.lse());
}

/// A backward problem with every gradient.
fn every_gradient() -> Problem {
    let mut p = Problem::new(2, 4, 8, 16, DType::Bf16).with_heads_kv(2, Layout::Bshd);
    p.score.sink = true;
    p.programs.score = Some("s + t0[b, h, q, k] - t1[h] * float(abs(q - k))".parse().unwrap());
    let bias = Table { strides: vec![0, 64, 8, 1], ..Table::dense(ElementType::Bf16, &[2, 4, 8, 8]) };
    p.programs.tables = vec![bias, Table::dense(ElementType::F32, &[4])];
    let wants = Gradients { sinks: true, tables: 0b11 };
    p.with_pass(Pass::Backward { deterministic: true, d_lse: true, wants })
}

#[test]
fn the_backward_pass_has_its_operands() {
    let p = every_gradient();
    p.check().unwrap();
    let names = |specs: Vec<Operand>| specs.iter().map(|o| o.name()).collect::<Vec<_>>().join(" ");
    assert_eq!(
        names(p.inputs().map(|spec| spec.operand).collect()),
        "q k v out d_out lse sinks table_0 table_1 d_lse"
    );
    assert_eq!(names(p.outputs().map(|spec| spec.operand).collect()), "dq dk dv d_sinks d_table_0 d_table_1");
    let elements = |operand| p.operand(operand).map(|spec| (spec.dtype, spec.elements));
    assert_eq!(elements(Operand::Tensor(Tensor::Dk)), Some((ElementType::Bf16, 2 * 2 * 8 * 16)));
    assert_eq!(elements(Operand::DLse), Some((ElementType::F32, 2 * 4 * 8)));
    // The batch broadcasts, so its gradient is one sum.
    assert_eq!(elements(Operand::DTable(0)), Some((ElementType::F32, 4 * 8 * 8)));
    assert_eq!(elements(Operand::DTable(1)), Some((ElementType::F32, 4)));
    let plain = Problem::mission().with_pass(Pass::BACKWARD);
    assert_eq!(names(plain.operands().map(|spec| spec.operand).collect()), "q k v out d_out dq dk dv lse");
    assert!(p.operands().map(|spec| spec.operand).is_sorted());
    assert_eq!(plain.flops(), 2.5 * Problem::mission().flops());
}

/// A gradient has the strides of its tensor until it is given others, and files keep both.
#[test]
fn gradients_have_strides() {
    let mut p = every_gradient();
    let padded = Strides { batch: 4096, head: 32, row: 128 };
    p.set_strides(Tensor::K, padded);
    assert_eq!((p.strides(Tensor::Dk), p.strides(Tensor::Dq)), (padded, p.q));
    p.set_strides(Tensor::Dk, Layout::Bshd.strides(2, 8, 16));
    assert_eq!((p.strides(Tensor::K), p.strides(Tensor::Dk).row), (padded, 32));
    assert_eq!(p.gradients.dk, Some(p.strides(Tensor::Dk)));
    assert_eq!(from_value::<Problem>(json!(p)).unwrap(), p);
    let plain = Problem::mission().with_pass(Pass::DETERMINISTIC);
    let stored = json!(plain);
    assert_eq!(
        (&stored["pass"], stored.get("gradients")),
        (&json!({ "backward": { "deterministic": true } }), None)
    );
    assert_eq!(from_value::<Problem>(stored).unwrap(), plain);
    assert_eq!(p.clone().with_layout(Layout::Bhsd).gradients, Problem::mission().gradients);
}

#[test]
fn shapes_distinguish_passes() {
    let of = |pass| Shape::of(&Problem::mission().with_pass(pass));
    let passes = [Pass::default(), Pass::BACKWARD, Pass::DETERMINISTIC];
    let texts = passes.map(|pass| of(pass).to_string());
    assert_eq!(texts[1..], ["1,8,512,64,f16,backward", "1,8,512,64,f16,backward:deterministic"]);
    assert_eq!(of(Pass::BACKWARD).title(), "f16 B1 H8 S512 D64 backward");
    for (i, pass) in passes.into_iter().enumerate() {
        assert_eq!(of(pass).problem().pass, pass);
        assert_eq!(from_value::<Shape>(json!(of(pass))).unwrap(), of(pass));
        assert!(passes[..i].iter().all(|&other| of(other) != of(pass)));
    }
    assert_eq!(json!(of(passes[0])).get("pass"), None);
}

#[test]
fn passes_without_derivatives_are_refused() {
    let refused = |change: fn(&mut Problem)| {
        let mut p = every_gradient();
        change(&mut p);
        p.check().unwrap_err().to_string()
    };
    assert!(refused(|p| p.dtypes = DType::E4m3.into()).contains("8-bit inputs have no gradients"));
    assert!(refused(|p| p.score.sink = false).contains("the problem has no sinks"));
    let wanted = Gradients { sinks: false, tables: 0b100 };
    let pass = Pass::Backward { deterministic: false, d_lse: false, wants: wanted };
    let missing = every_gradient().with_pass(pass).check().unwrap_err();
    assert!(missing.to_string().contains("a table that is missing"));
    let overlapping = refused(|p| p.set_strides(Tensor::Dk, Strides { batch: 0, head: 16, row: 32 }));
    assert!(overlapping.contains("for the strides of dk: expected strides with which no two rows overlap"));
    // Tensors without elements, whose strides may be any: PyTorch keeps those of an expanded tensor.
    for empty in
        [|p: &mut Problem| p.seq_kv = 0, |p: &mut Problem| p.seq_q = 0, |p: &mut Problem| p.batch = 0]
    {
        let mut p = every_gradient();
        empty(&mut p);
        for tensor in [Tensor::Dq, Tensor::Dk, Tensor::Dv] {
            if p.extents(tensor).contains(&0) {
                p.set_strides(tensor, Strides { batch: 0, head: 16, row: 16 });
            }
        }
        p.with_a_row().check().unwrap();
    }
    // An input may broadcast where an output may not: d_out as `sum().backward()` makes it.
    let mut p = every_gradient();
    p.set_strides(Tensor::DOut, Strides { batch: 0, head: 0, row: 0 });
    p.set_strides(Tensor::Out, Strides { batch: 0, head: 0, row: 0 });
    p.check().unwrap();
    let expected = ProblemError::Pass { pass: PassKind::Backward, expected: PassKind::Forward };
    assert_eq!(p.expect_pass(PassKind::Forward), Err(expected.clone()));
    assert_eq!(expected.to_string(), "invalid value 'backward' for the pass: expected forward");
}

/// The forward pass drops keys that no row sees; the backward pass writes their gradients.
#[test]
fn the_backward_pass_keeps_unseen_keys() {
    let p = Problem::mission().with_seq_kv(600, Layout::Bhsd).with_band("causal-top-left".parse().unwrap());
    assert_eq!(p.canonical().seq_kv, 512);
    assert_eq!(p.with_pass(Pass::BACKWARD).canonical().seq_kv, 600);
}
