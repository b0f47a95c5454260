use problem::{DType, Mask, Tensor};
use ptx::{
    Arg, Dim3, Function, FunctionKind, Item, LaunchBounds, Linkage, Module, Param, ParamSpace, Target,
};
use ptx::{Type, Version};

use super::{ArgSpec, BufferType, Init, LaunchError, LaunchSpec, Role};

const FILE: &str = r#"
[problem]
heads_q = 8
heads_kv = 2
seq_q = 5
seq_kv = 7
head_dim = 16
dtype = "bf16"
mask = "causal"
[launch]
grid = [8, 2]
block = [128, 1, 1]
dynamic_shared = 1024
[[arg]]
role = "q"
layout = "bshd"
[[arg]]
role = "out"
[[arg]]
role = "buffer"
dtype = "f32"
elements = 10
init = "iota"
[[arg]]
role = "f32"
value = 2
"#;

fn module(params: &[Type], bounds: LaunchBounds) -> Module {
    let param = |(i, &ty): (usize, &Type)| Param {
        space: ParamSpace::Param,
        align: ty.bytes(),
        ty,
        name: format!("p{i}").into(),
        elements: None,
        pointer: None,
    };
    let entry = Function {
        kind: FunctionKind::Entry,
        linkage: Linkage::Visible,
        name: "kernel".into(),
        returns: Vec::new(),
        params: params.iter().enumerate().map(param).collect(),
        bounds,
        body: Some(ptx::Body::default()),
    };
    Module {
        version: Version { major: 7, minor: 0 },
        target: Target::sm(80),
        items: vec![Item::Function(entry)],
    }
}

const PARAMS: [Type; 4] = [Type::U64, Type::B64, Type::U64, Type::F32];

#[test]
fn reads_what_is_documented() {
    let spec: LaunchSpec = FILE.parse().unwrap();
    let problem = spec.problem.clone().unwrap();
    assert_eq!((problem.batch, problem.heads_kv, problem.seq_kv), (1, 2, 7));
    assert_eq!((problem.dtype, problem.mask, problem.scale), (DType::Bf16, Mask::Causal, None));
    assert_eq!((problem.q.head, problem.q.row, problem.out.row), (16, 128, 16));
    assert_eq!(spec.grid, Dim3(8, 2, 1));
    let buffer = ArgSpec::Buffer { dtype: BufferType::F32, elements: 10, init: Init::Iota };
    assert_eq!(spec.args[2], buffer);
    let bound = spec.bind(module(&PARAMS, LaunchBounds::default())).unwrap();
    assert_eq!(bound.kernel.args[3], Arg::F32(2.0));
    assert_eq!(bound.kernel.args[2], Arg::Buffer { index: 2, offset: 0 });
    assert_eq!(bound.kernel.buffers[2].bytes, 40);
    assert_eq!(bound.roles[1], Role::Tensor(Tensor::Out));
}

fn refusal(from: &str, to: &str) -> String {
    assert!(FILE.contains(from), "{from} is not in the file");
    FILE.replacen(from, to, 1).parse::<LaunchSpec>().unwrap_err().to_string()
}

#[test]
fn refusals_name_key_value_and_what_is_accepted() {
    let cases = [
        ("seq_q = 5", "seq_q = 0", "problem.seq_q = 0 is not possible; accepted: 1 or more"),
        ("heads_kv = 2", "heads_kv = 3", "heads_q = 8 is not a multiple of heads_kv = 3"),
        ("\"bf16\"", "\"fp8\"", "dtype = \"fp8\" is unknown; accepted: f16, bf16, f32"),
        ("\"causal\"", "\"casual\"", "mask = \"casual\" is unknown; accepted: none, causal"),
        ("grid = [8, 2]", "grid = []", "launch.grid = [] is not possible; accepted: one to three numbers"),
        ("grid = [8, 2]", "grid = [8, -2]", "launch.grid = [8, -2]"),
        ("[128, 1, 1]", "[64, 64, 1]", "launch.block = [64, 64, 1] is not possible; accepted: 1 to 1024"),
        ("= 1024", "= 999999", "launch.dynamic_shared = 999999 is not possible; accepted: 0 to 232448 bytes"),
        (
            "role = \"q\"",
            "role = \"query\"",
            "[[arg]] 0 role = \"query\" is not possible; accepted: q, k, v, out",
        ),
        ("\"bshd\"", "\"dhsb\"", "layout = \"dhsb\" is unknown; accepted: bhsd, bshd"),
        ("elements = 10", "elements = -1", "[[arg]] 2 elements = -1 is not possible; accepted: 1 or more"),
        ("elements = 10\n", "", "[[arg]] 2 has role = \"buffer\" and needs `elements`"),
        ("elements = 10", "elements = 9999999999", "size of [[arg]] 2 = 39999999996 bytes"),
        ("\"iota\"", "\"ones\"", "accepted: zeros random uninitialised iota"),
        ("value = 2", "value = \"2\"", "[[arg]] 3 value = \"2\" is not possible; accepted: a number"),
        ("value = 2", "value = 2\ninit = \"zeros\"", "takes no `init`; leave it out"),
        ("role = \"out\"", "role = \"q\"", "[[arg]] 1 repeats role = \"q\""),
        ("block", "blocks", "unknown field `blocks`"),
        ("heads_q = 8\n", "", "missing field `heads_q`"),
    ];
    for (from, to, expected) in cases {
        let error = refusal(from, to);
        assert!(error.contains(expected), "{to}: {error}");
    }
    assert!(matches!("[launch".parse::<LaunchSpec>(), Err(LaunchError::Syntax(_))));
}

#[test]
fn arguments_must_fit_the_entry() {
    let spec: LaunchSpec = FILE.parse().unwrap();
    let bind = |params: &[Type]| spec.bind(module(params, LaunchBounds::default()));
    assert!(matches!(bind(&PARAMS[..3]), Err(LaunchError::Count { args: 4, params: 3, .. })));
    let wrong = bind(&[Type::U64, Type::U32, Type::U64, Type::F32]);
    assert!(matches!(wrong, Err(LaunchError::Mismatch { index: 1, .. })), "{wrong:?}");
    let wrong = bind(&[Type::U64, Type::U64, Type::U64, Type::U32]);
    assert!(matches!(wrong, Err(LaunchError::Mismatch { index: 3, .. })), "{wrong:?}");
    let bounds = LaunchBounds { required_threads: Some([64, 1, 1]), ..LaunchBounds::default() };
    let error = spec.bind(module(&PARAMS, bounds)).unwrap_err().to_string();
    assert!(error.contains("accepted: [64, 1, 1], the entry's .reqntid"), "{error}");
}

#[test]
fn the_entry_is_found_or_named() {
    let mut spec: LaunchSpec = FILE.parse().unwrap();
    spec.entry = Some("other".into());
    let error = spec.bind(module(&PARAMS, LaunchBounds::default())).unwrap_err();
    assert_eq!(error, LaunchError::UnknownEntry { name: "other".into(), accepted: "kernel".into() });
    spec.entry = None;
    let mut two = module(&PARAMS, LaunchBounds::default());
    two.items.push(two.items[0].clone());
    assert!(matches!(spec.bind(two), Err(LaunchError::AmbiguousEntry { .. })));
    let none = Module { items: Vec::new(), ..module(&[], LaunchBounds::default()) };
    assert_eq!(spec.bind(none).unwrap_err(), LaunchError::NoEntry);
}
