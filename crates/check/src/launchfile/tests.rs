use problem::{Band, DType, Operand};
use ptx::{
    Arg, Dim3, Function, FunctionKind, Item, LaunchBounds, Linkage, Module, Param, ParamSpace, StructArg,
    Target,
};
use ptx::{Element, Swizzle, TensorMapSpec, Type, Verified, Version};

use super::{ArgSpec, BufferType, FORMAT, Init, LaunchError, LaunchSpec, Memory, Role};

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

fn module(params: &[Type], bounds: LaunchBounds) -> Verified {
    let sizes: Vec<_> = params.iter().map(|ty| (*ty == Type::B8).then_some(TensorMapSpec::BYTES)).collect();
    module_of(params, &sizes, bounds)
}

/// A module whose entry has these parameters; `sizes` are the elements of arrays.
fn module_of(params: &[Type], sizes: &[Option<u32>], bounds: LaunchBounds) -> Verified {
    let param = |(i, &ty): (usize, &Type)| Param {
        space: ParamSpace::Param,
        align: ty.bytes(),
        ty,
        name: format!("p{i}").into(),
        elements: sizes[i],
        pointer: None,
    };
    let param = |given| match param(given) {
        // A struct passed by value: a tensor map.
        map if map.ty == Type::B8 => Param { align: TensorMapSpec::ALIGN, ..map },
        other => other,
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
    let items = vec![Item::Function(entry)];
    Module { version: Version { major: 7, minor: 0 }, target: Target::sm(80), items }.verify().unwrap()
}

const PARAMS: [Type; 4] = [Type::U64, Type::B64, Type::U64, Type::F32];

#[test]
fn reads_what_is_documented() {
    let spec: LaunchSpec = FILE.parse().unwrap();
    let problem = spec.problem.clone().unwrap();
    assert_eq!((problem.batch, problem.heads_kv, problem.seq_kv), (1, 2, 7));
    assert_eq!((problem.dtypes, problem.band, problem.score.scale), (DType::Bf16.into(), Band::CAUSAL, None));
    assert_eq!((problem.q.head, problem.q.row, problem.out.row), (16, 128, 16));
    assert_eq!(spec.launches[0].grid, Dim3(8, 2, 1));
    let memory = Memory::new(BufferType::F32, 10, Init::Iota);
    assert_eq!(spec.args[2], ArgSpec::Buffer(memory));
    let bound = spec.bind(module(&PARAMS, LaunchBounds::default())).unwrap();
    assert_eq!(bound.kernel.args[3], Arg::F32(2.0));
    assert_eq!(bound.kernel.args[2], Arg::Buffer { index: 2, offset: 0 });
    assert_eq!(bound.kernel.buffers[2].bytes, 40);
    assert_eq!(bound.roles[1], Role::Operand(Operand::OUT));
}

/// Cases `what is replaced | by what | words of the error`, one a line. `\n` stands for a new line.
fn assert_refused(file: &str, cases: &str) {
    for case in cases.trim().lines() {
        let parts: Vec<String> = case.split('|').map(|part| part.trim().replace("\\n", "\n")).collect();
        let [from, to, expected] = &parts[..] else { panic!("three parts: {case}") };
        assert!(file.contains(from), "{from} is not in the file");
        let error = file.replacen(from, to, 1).parse::<LaunchSpec>().unwrap_err().to_string();
        assert!(error.contains(expected), "{to}: {error}");
    }
}

#[test]
fn refusals_name_key_value_and_what_is_accepted() {
    let cases = r#"
seq_q = 5 | seq_q = 0 | invalid value '0' for problem.seq_q: expected 1 or more
head_dim = 16 | head_dim = 16\nhead_dim_v = 0 | invalid value '0' for problem.head_dim_v: expected 1 or more
head_dim = 16 | head_dim = 16\nhead_dim_v = "16" | head_dim_v = "16"
heads_kv = 2 | heads_kv = 3 | expected a multiple of heads_kv = 3
"bf16" | "fp8" | invalid value 'fp8' for dtype: expected f16, bf16, f32, tf32, e4m3, e5m2
"causal" | "casual" | invalid value 'casual' for mask: expected none, causal, causal-top-left
grid = [8, 2] | grid = [] | invalid value '[]' for launch.grid: expected one to three numbers
grid = [8, 2] | grid = [8, -2] | '[8, -2]' for launch.grid
[128, 1, 1] | [64, 64, 1] | invalid value '[64, 64, 1]' for launch.block: expected 1 to 1024
= 1024 | = 999999 | invalid value '999999' for launch.dynamic_shared: expected 0 to 232448 bytes
role = "q" | role = "query" | invalid value 'query' for [[arg]] 0 role: expected q, k, v, out
"bshd" | "dhsb" | launch file: invalid value 'dhsb' for [[arg]] 0 layout: expected bhsd or bshd
elements = 10 | elements = -1 | invalid value '-1' for [[arg]] 2 elements: expected 1 or more
elements = 10\n | | [[arg]] 2 has role = "buffer" and needs `elements`
elements = 10 | elements = 9999999999 | '39999999996 bytes' for size of [[arg]] 2
"iota" | "ones" | expected zeros random uninitialised iota
value = 2 | value = "2" | invalid value '"2"' for [[arg]] 3 value: expected a number
value = 2 | value = 2\ninit = "zeros" | takes no `init`; leave it out
role = "out" | role = "q" | [[arg]] 1 repeats role = "q"
block | blocks | unknown field `blocks`
heads_q = 8\n | | missing field `heads_q`
"#;
    assert_refused(FILE, cases);
    assert!(matches!("[launch".parse::<LaunchSpec>(), Err(LaunchError::Syntax(_))));
}

/// V and O may have a different head dimension than Q and K.
#[test]
fn values_have_an_extent_of_their_own() {
    let problem = |file: &str| file.parse::<LaunchSpec>().unwrap().problem.unwrap();
    assert_eq!(problem(FILE).head_dim_v, 16);
    let wider = problem(&FILE.replacen("head_dim = 16", "head_dim = 16\nhead_dim_v = 24", 1));
    assert_eq!((wider.head_dim, wider.head_dim_v), (16, 24));
    assert_eq!([wider.q.row, wider.k.row, wider.v.row, wider.out.row], [16 * 8, 16, 24, 24]);
    assert_eq!(wider.softmax_scale(), 0.25, "the keys' extent decides");
}

#[test]
fn a_problem_without_an_answer_is_refused() {
    let without = |other: &str| {
        FILE.replacen("role = \"out\"", other, 1).parse::<LaunchSpec>().map(|spec| spec.args.len())
    };
    assert_eq!(without("role = \"k\""), Err(LaunchError::Unjudged));
    assert_eq!(without("role = \"lse\""), Err(LaunchError::Unjudged));
    assert_eq!(without("role = \"tensor_map\"\nof = \"k\"\nbox = [8, 1, 1, 1]"), Err(LaunchError::Unjudged));
    assert_eq!(without("role = \"tensor_map\"\nof = \"out\"\nbox = [8, 1, 1, 1]"), Ok(4));
}

#[test]
fn arguments_must_fit_the_entry() {
    let spec: LaunchSpec = FILE.parse().unwrap();
    let bind = |params: &[Type]| spec.bind(module(params, LaunchBounds::default()));
    let count = bind(&PARAMS[..3]);
    assert!(matches!(count, Err(LaunchError::Count { args: 4, params: 3, listed: false, .. })));
    let listed = FILE.replacen("block = ", "args = [\"q\", \"out\"]\nblock = ", 1);
    let error = listed.parse::<LaunchSpec>().unwrap();
    let error = error.bind(module(&PARAMS, LaunchBounds::default())).unwrap_err().to_string();
    assert!(error.contains("2 arguments given in launch.args, but entry"), "{error}");
    let wrong = bind(&[Type::U64, Type::U32, Type::U64, Type::F32]);
    assert!(matches!(wrong, Err(LaunchError::Mismatch { index: 1, .. })), "{wrong:?}");
    let wrong = bind(&[Type::U64, Type::U64, Type::U64, Type::U32]);
    assert!(matches!(wrong, Err(LaunchError::Mismatch { index: 3, .. })), "{wrong:?}");
    let bounds = LaunchBounds { required_threads: Some([64, 1, 1]), ..LaunchBounds::default() };
    let error = spec.bind(module(&PARAMS, bounds)).unwrap_err().to_string();
    assert!(error.contains("expected [64, 1, 1], the entry's .reqntid"), "{error}");
}

#[test]
fn the_entry_is_found_or_named() {
    let mut spec: LaunchSpec = FILE.parse().unwrap();
    spec.launches[0].entry = Some("other".into());
    let error = spec.bind(module(&PARAMS, LaunchBounds::default())).unwrap_err();
    assert_eq!(
        error,
        LaunchError::UnknownEntry { key: "launch".into(), name: "other".into(), accepted: "kernel".into() }
    );
    spec.launches[0].entry = None;
    let mut two = module(&PARAMS, LaunchBounds::default()).into_module();
    let mut second = two.items[0].clone();
    if let Item::Function(entry) = &mut second {
        entry.name = "second".into();
    }
    two.items.push(second);
    let mut none = two.clone();
    assert!(matches!(spec.bind(two.verify().unwrap()), Err(LaunchError::AmbiguousEntry { .. })));
    none.items.clear();
    assert_eq!(spec.bind(none.verify().unwrap()).unwrap_err(), LaunchError::NoEntry);
}

#[test]
fn the_documented_format_is_a_launch_file() {
    let mut spec: LaunchSpec = FORMAT.parse().unwrap();
    let roles: Vec<_> = spec.args.iter().map(ArgSpec::role).collect();
    assert_eq!(roles, ["out", "buffer", "pointer", "u32", "tensor_map", "tensor_map", "struct", "pointers"]);
    let params = [Type::U64, Type::U64, Type::U64, Type::U32, Type::B8, Type::B8, Type::B8, Type::U64];
    let sizes = [None, None, None, None, Some(128), Some(128), Some(40), None];
    let module = module_of(&params, &sizes, LaunchBounds::default());
    spec.launches[0].entry = None;
    let missing = spec.bind(module.clone()).unwrap_err().to_string();
    assert!(missing.contains("'weights' for [[constant]] name: expected a variable"), "{missing}");
    spec.constants.clear();
    let bound = spec.bind(module).unwrap();
    let kernel = &bound.kernel;
    let names: Vec<_> = kernel.buffers.iter().map(|buffer| buffer.name.as_str()).collect();
    assert_eq!(names, ["out", "sums", "k", "table"]);
    let [of_k, of_buffer] = &kernel.tensor_maps[..] else { panic!("{:?}", kernel.tensor_maps) };
    assert_eq!((of_k.buffer, of_k.element, of_k.swizzle), (2, Element::F16, Swizzle::Bytes128));
    assert_eq!((&of_k.extents[..], &of_k.strides[..]), (&[64, 512, 8, 1][..], &[128, 65_536, 524_288][..]));
    assert_eq!((of_buffer.buffer, of_buffer.element, of_buffer.offset), (1, Element::F32, 128));
    assert_eq!((&of_buffer.extents[..], &of_buffer.strides[..]), (&[32, 16][..], &[256][..]));
    assert_eq!(kernel.args[4..6], [Arg::TensorMap { index: 0 }, Arg::TensorMap { index: 1 }]);
    let address = |index| Arg::Buffer { index, offset: 0 };
    let fields = vec![
        (0, Arg::I32(8)),
        (4, Arg::I32(128)),
        (8, Arg::Buffer { index: 1, offset: 8 }),
        (16, Arg::U8(1)),
        (24, Arg::F64(1.5)),
        (32, Arg::U8(0)),
        (33, Arg::U8(255)),
    ];
    assert_eq!(kernel.args[2], Arg::Buffer { index: 1, offset: 512 });
    assert_eq!(kernel.args[6], Arg::Struct(StructArg { bytes: 40, fields }));
    assert_eq!(bound.words, [vec![address(1), Arg::Null, address(0)]]);
    assert_eq!(bound.references.len(), 1);
}

/// Addresses in the contents of a file are those that the memory has in the emulator.
#[test]
fn contents_of_files_have_addresses_of_other_memory() {
    let text = r#"
launch = { grid = [1], block = [32] }
[[arg]]
name = "table"
role = "buffer"
dtype = "u64"
elements = 2
init = { file = "table.npy" }
addresses = [{ at = 8, of = 1, plus = 4 }]
[[arg]]
role = "buffer"
dtype = "f32"
elements = 4
"#;
    let mut spec: LaunchSpec = text.parse().unwrap();
    spec.data = vec![[7; 16].as_slice().into()];
    let module = module_of(&[Type::U64, Type::U64], &[None, None], LaunchBounds::default());
    let address = emu::argument_bytes(&Arg::Buffer { index: 1, offset: 4 });
    assert_eq!(*spec.bind(module).unwrap().data[0], *[&[7; 8], &address[..]].concat());
    for (old, new, said) in [
        ("at = 8", "at = 9", "'9' for [[arg]] 0 addresses[0] at: expected 8 bytes within the buffer"),
        (
            "of = 1",
            "of = 2",
            "'2' for [[arg]] 0 addresses[0] of: expected the name or the number of an [[arg]]",
        ),
        ("plus = 4", "plus = -4", "'-4' for [[arg]] 0 addresses[0] plus: expected 0 or more"),
        ("{ file = \"table.npy\" }", "\"zeros\"", "at: expected a buffer with elements and init = { file"),
    ] {
        let error = text.replace(old, new).parse::<LaunchSpec>().unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

/// A launch file with Q, K and V as tensor maps, two maps of the same tensor, and a map of separate memory.
const MAPS: &str = r#"
[problem]
heads_q = 2
seq_q = 64
head_dim = 64
dtype = "bf16"
[launch]
grid = [1]
block = [128]
[[arg]]
role = "buffer"
dtype = "f16"
elements = 4096
[[arg]]
role = "tensor_map"
of = "k"
layout = "bshd"
box = [64, 32, 1, 1]
swizzle = "128"
fill = "zeros"
[[arg]]
role = "tensor_map"
of = 0
offset = 0
dims = [64, 64]
strides = [128]
box = [32, 16]
swizzle = "64"
[[arg]]
role = "k"
[[arg]]
role = "tensor_map"
dtype = "u8"
elements = 512
init = "iota"
dims = [32, 16]
box = [16, 16]
[[arg]]
role = "out"
"#;

#[test]
fn tensor_maps_show_tensors_buffers_and_memory_of_their_own() {
    let spec: LaunchSpec = MAPS.parse().unwrap();
    let params = [Type::U64, Type::B8, Type::B8, Type::U64, Type::B8, Type::U64];
    let bound = spec.bind(module(&params, LaunchBounds::default())).unwrap();
    let own = Role::Fill(Memory::new(BufferType::U8, 512, Init::Iota));
    let fill = Role::Fill(Memory::new(BufferType::F16, 4096, Init::Uninitialised));
    assert_eq!(bound.roles, [fill, Role::Operand(Operand::K), own, Role::Operand(Operand::OUT)]);
    let buffers: Vec<_> = bound.kernel.tensor_maps.iter().map(|map| map.buffer).collect();
    assert_eq!(buffers, [1, 0, 2]);
    // Heads lie between rows, in the map as in the tensor of the pointer argument.
    assert_eq!(bound.kernel.tensor_maps[0].strides, [256, 128, 16_384]);
    assert_eq!(bound.problem.unwrap().k.row, 128);
    assert_eq!(bound.kernel.tensor_maps[2].strides, [32]);
    let wrong = spec.bind(module(&[Type::U64; 6], LaunchBounds::default())).unwrap_err().to_string();
    assert!(
        wrong.contains("[[arg]] 1 (tensor_map) is a tensor map of 128 bytes at a multiple of 64"),
        "{wrong}"
    );
}

#[test]
fn tensor_maps_that_the_hardware_refuses_are_named() {
    let cases = r#"
of = "k" | of = "lse" | invalid value 'lse' for [[arg]] 1 of: expected q, k, v, out, or the number
of = 0 | of = 3 | invalid value '3' for [[arg]] 2 of
of = 0 | of = 9 | invalid value '9' for [[arg]] 2 of
box = [64, 32, 1, 1] | box = [64, 32] | [[arg]] 1: tensor map: invalid value '2' for box_extents: expected one per dimension
box = [64, 32, 1, 1] | box = [64, 257, 1, 1] | [[arg]] 1: tensor map: invalid value '257' for box extent: expected 1 to 256
box = [64, 32, 1, 1] | box = [64, 0, 1, 1] | invalid value '0' for box extent: expected 1 to 256
box = [64, 32, 1, 1] | box = [64, -1, 1, 1] | '[64, -1, 1, 1]' for [[arg]] 1 box
box = [64, 32, 1, 1] | box = [4, 32, 1, 1] | invalid value '8' for box row in bytes: expected multiples of 16
box = [32, 16]\nswizzle = "64" | box = [64, 16]\nswizzle = "64" | invalid value '128' for box row in bytes: expected up to 64
swizzle = "128" | swizzle = "256" | invalid value '256' for [[arg]] 1 swizzle: expected none, 32, 64, 128
fill = "zeros" | fill = "nan" | invalid value 'nan' for [[arg]] 1 fill: expected zeros
strides = [128] | strides = [120] | [[arg]] 2: tensor map: invalid value '120' for stride in bytes: expected multiples of 16 below 2^40
strides = [128] | strides = [1099511627776] | invalid value '1099511627776' for stride in bytes
strides = [128] | strides = [128, 128] | invalid value '2' for strides: expected one fewer
strides = [128] | strides = [144] | invalid value '8192' for buffer's bytes: expected at least 9200
offset = 0 | offset = 8 | [[arg]] 2: tensor map: invalid value '8' for offset in bytes: expected multiples of 16
offset = 0 | offset = -16 | invalid value '-16' for [[arg]] 2 offset: expected 0 or more
dims = [64, 64]\n | | [[arg]] 2 has role = "tensor_map" and needs `dims`
dims = [64, 64] | dims = [] | invalid value '0' for rank: expected 1 to 5
dims = [64, 64] | dims = [64, 0] | invalid value '0' for extent: expected 1 to 2^32
box = [32, 16]\n | | needs `box`
of = 0 | of = 0\nelements = 9 | [[arg]] 2 has role = "tensor_map", which takes no `elements`
elements = 512\n | | [[arg]] 4 has role = "tensor_map" and needs `elements`
role = "k" | role = "k"\nlayout = "bhsd" | invalid value 'bhsd' for [[arg]] 3 layout: expected bshd, as [[arg]] 1
role = "k" | role = "k"\nswizzle = "32" | which takes no `swizzle`
head_dim = 64 | head_dim = 60 | tensor map: invalid value '120' for stride in bytes
"#;
    assert_refused(MAPS, cases);
}

const PLAIN: &str = r#"
[launch]
grid = [4]
block = [32]
[[arg]]
name = "x"
role = "buffer"
dtype = "f32"
shape = [4, 8]
init = "random"
[[arg]]
name = "y"
role = "buffer"
dtype = "f32"
shape = [4, 8]
"#;

fn plain(more: &str) -> Result<LaunchSpec, LaunchError> {
    format!("{PLAIN}{more}").parse()
}

#[test]
fn every_number_type_has_its_range() {
    for (ty, good, bad) in [
        ("bool", "true", "2"),
        ("u8", "255", "256"),
        ("i8", "-128", "128"),
        ("u16", "65535", "-1"),
        ("i16", "-32768", "32768"),
        ("u32", "4294967295", "4294967296"),
        ("i32", "-2147483648", "2147483648"),
        ("u64", "9223372036854775807", "-1"),
        ("i64", "-9223372036854775808", "0.5"),
        ("f16", "-inf", "\"x\""),
        ("bf16", "1.5", "true"),
        ("f32", "nan", "[1]"),
        ("f64", "1e300", "\"1\""),
        ("f16", "65504", "65520"),
        ("bf16", "3.38e38", "3.4e38"),
        ("f32", "3.4e38", "1e40"),
    ] {
        let file = |value: &str| plain(&format!("[[arg]]\nrole = \"{ty}\"\nvalue = {value}\n"));
        assert_eq!(file(good).unwrap().args[2].role(), ty);
        let error = file(bad).unwrap_err().to_string();
        assert!(error.contains("for [[arg]] 2 value: expected"), "{ty}: {error}");
    }
}

#[test]
fn contents_are_checked_against_their_type() {
    let init = |dtype: &str, init: &str| {
        plain(&format!("[[arg]]\nrole = \"buffer\"\ndtype = \"{dtype}\"\nelements = 4\ninit = {init}\n"))
    };
    for (dtype, text) in [
        ("e4m3", "\"random\""),
        ("i8", "-128"),
        ("f16", "-inf"),
        ("bf16", "\"-inf\""),
        ("f32", "1"),
        ("i32", "{ integers = [-5, 5] }"),
        ("f64", "{ file = \"x.npy\" }"),
    ] {
        assert!(init(dtype, text).is_ok(), "{dtype} {text}: {:?}", init(dtype, text));
    }
    for (dtype, text, said) in [
        ("u8", "256", "invalid value '256' for [[arg]] 2 init: expected 0 to 255, which u8 holds"),
        ("i32", "0.5", "expected a whole number"),
        ("i32", "\"-inf\"", "expected a whole number"),
        ("u8", "{ integers = [-1, 5] }", "expected { integers = [low, high] }"),
        ("u8", "{ integers = [5, 1] }", "expected { integers = [low, high] }"),
        ("f32", "{ path = \"x\" }", "expected zeros random uninitialised iota, a number"),
        ("f8", "1", "invalid value 'f8' for [[arg]] 2 dtype: expected u8 i8"),
    ] {
        let error = init(dtype, text).unwrap_err().to_string();
        assert!(error.contains(said), "{dtype} {text}: {error}");
    }
}

#[test]
fn refusals_of_the_newer_keys_name_their_place() {
    for (more, said) in [
        (
            "[[arg]]\nname = \"x\"\nrole = \"i32\"\nvalue = 1\n",
            "'x' for [[arg]] 2 name: expected another name",
        ),
        (
            "[[arg]]\nrole = \"pointers\"\nof = [\"z\"]\n",
            "for [[arg]] 2 of: expected an array of at least one name",
        ),
        ("[[arg]]\nrole = \"struct\"\n", "[[arg]] 2 has role = \"struct\" and needs `fields`"),
        (
            "[[arg]]\nrole = \"struct\"\nfields = [{ role = \"i32\", value = 5000000000 }]\n",
            "'5000000000' for [[arg]] 2 fields[0] value: expected a whole number from -2^31 to 2^31 - 1",
        ),
        (
            "[[arg]]\nrole = \"struct\"\nbytes = 4\nfields = [{ role = \"f64\", value = 1 }]\n",
            "'4' for [[arg]] 2 bytes: expected 8 or more",
        ),
        (
            "[[arg]]\nrole = \"struct\"\nfields = [{ role = \"pointer\", of = \"z\" }]\n",
            "'z' for [[arg]] 2 fields[0] of: expected the name or the number",
        ),
        (
            "[[arg]]\nrole = \"struct\"\nfields = [{ role = \"tensor_map\", of = 0 }]\n",
            "'0' for [[arg]] 2 fields[0] of: expected the name or the number of an [[arg]] with role = \"tensor_map\"",
        ),
        (
            "[[arg]]\nrole = \"buffer\"\ndtype = \"f32\"\nshape = [4, 4]\nstrides = [4]\n",
            "'[4]' for [[arg]] 2 strides: expected 2 numbers",
        ),
        ("[[arg]]\nrole = \"buffer\"\ndtype = \"f32\"\nshape = [0]\n", "'[0]' for [[arg]] 2 shape"),
        (
            "[reference]\nbuiltin = \"fft\"\ninputs = [\"x\"]\n",
            "'fft' for reference.builtin: expected softmax",
        ),
        (
            "[reference]\nbuiltin = \"gemm\"\ninputs = [\"x\"]\n",
            "'[4, 8] for an output of shape [4, 8]' for reference.inputs: expected A [.., M, K]",
        ),
        (
            "[reference]\nbuiltin = \"attention_backward\"\ninputs = [\"x\"]\n",
            "'(missing)' for reference.gradient: expected q, k, v",
        ),
        (
            "[reference]\nbuiltin = \"attention_backward\"\ngradient = \"k\"\ninputs = [\"x\"]\n",
            "for reference.inputs: expected Q [batch, heads, rows, dim]",
        ),
        ("[reference]\noutput = \"z\"\nfile = \"y.npy\"\n", "'z' for reference.output: expected the name"),
        ("[reference]\n", "for reference: expected exactly one of `builtin`"),
        (
            "[reference]\nfile = \"y.npy\"\natol = -1\n",
            "'-1' for reference.atol: expected a finite number, 0 or more",
        ),
        ("[reference]\nfile = \"y.npy\"\natol = inf\n", "'inf' for reference.atol: expected a finite number"),
        (
            "[reference]\nbuiltin = \"softmax\"\ninputs = []\n",
            "invalid value '[] for an output of shape [4, 8]' for reference.inputs",
        ),
        (
            "[[arg]]\nrole = \"i32\"\nvalue = 5.5\n",
            "'5.5' for [[arg]] 2 value: expected a whole number from -2^31",
        ),
        ("[reference]\nfile = \"y.npy\"\neps = 1e-5\n", "'(given)' for reference.eps: expected no `eps`"),
        ("[reference]\npython = \"f\"\n", "'f' for reference.python: expected FILE.py:FUNCTION"),
        ("[reference]\npython = \"f.py:f\"\ntimeout = 0\n", "'0' for reference.timeout: expected seconds"),
        ("[[constant]]\nname = \"w\"\ndtype = \"f32\"\n", "expected one of `values` and `init`"),
    ] {
        let error = plain(more).unwrap_err().to_string();
        assert!(error.contains(said), "{more}: {error}");
    }
    let args = PLAIN.replace("block = [32]", "block = [32]\nargs = [\"z\"]");
    let error = args.parse::<LaunchSpec>().unwrap_err().to_string();
    assert!(error.contains("'z' for launch.args: expected the name or the number"), "{error}");
    let many = PLAIN.replace("[launch]", "[[launch]]\ngrid = [1]\nblock = [0]\n[[launch]]");
    let error = many.parse::<LaunchSpec>().unwrap_err().to_string();
    assert!(error.contains("'[0]' for launch[0].block"), "{error}");
}

/// A launch file from an untrusted source must not cause files to be read or Python to be run.
#[test]
fn files_are_read_only_on_request() {
    let module = || module(&[Type::U64, Type::U64], LaunchBounds::default());
    for (more, key) in [
        ("[reference]\npython = \"f.py:f\"\n", "reference.python names a file"),
        ("[reference]\nkernel = \"f.cu\"\n", "reference.kernel names a file"),
        ("[reference]\nfile = \"f.npy\"\n", "reference.file names a file"),
    ] {
        let error = plain(more).unwrap().bind(module()).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
    let spec: LaunchSpec = PLAIN.replace("\"random\"", "{ file = \"x.npy\" }").parse().unwrap();
    let error = spec.bind(module()).unwrap_err().to_string();
    assert!(error.contains("[[arg]] 0 init names a file"), "{error}");
}

#[test]
fn the_cluster_is_that_of_the_entry_by_default() {
    let mut module = module(&[Type::U64, Type::U64], LaunchBounds::default()).into_module();
    (module.target, module.version) = (Target::sm(90), Version { major: 7, minor: 8 });
    if let Item::Function(entry) = &mut module.items[0] {
        entry.bounds.required_cluster = Some([2, 1, 1]);
    }
    let module = module.verify().unwrap();
    let bound = plain("").unwrap().bind(module.clone()).unwrap();
    assert_eq!(bound.kernel.launch.cluster, Dim3(2, 1, 1));
    let odd: LaunchSpec = PLAIN.replace("grid = [4]", "grid = [3]").parse().unwrap();
    let error = odd.bind(module).unwrap_err().to_string();
    assert!(error.contains("'[2, 1, 1]' for launch.cluster"), "{error}");
}
