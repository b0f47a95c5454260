//! The command `flashcore run`: computes attention on tensors in files.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use check::files::{Tensor, encode, load, parse};
use cpu::kept::{self, Choice};
use host::store;
use judge::values::{Inputs, Values};
use problem::{Band, DType, DTypes, Layout, Problem, Score};
use serde_json::json;

use crate::args::Run;
use crate::error::CliError;
use crate::{Status, plan, source, terminal, unless_closed};

pub fn run(args: &Run) -> Result<Status, CliError> {
    let layout = args.layout;
    source::not_beside_json("--out", &args.out, args.json)?;
    let mut stdin = Stdin::default();
    let to_stdout = store::is_standard(&args.out);
    let extension = args.out.extension().and_then(|extension| extension.to_str());
    if !to_stdout && !matches!(extension, Some("npy" | "safetensors")) {
        return Err(CliError::Argument {
            argument: "--out",
            value: args.out.display().to_string(),
            accepted: "a .npy or a .safetensors file, or -".to_owned(),
        });
    }
    let inputs = [("--q", Some(&args.q)), ("--k", args.k.as_ref()), ("--v", args.v.as_ref())];
    let inputs: Vec<_> =
        inputs.iter().filter_map(|(name, file)| Some((*name, file.as_ref()?.as_path()))).collect();
    source::distinct("--out", &args.out, &inputs)?;
    store::writable(&args.out)?;
    let in_q = |path: &Option<std::path::PathBuf>| path.as_deref().unwrap_or(&args.q).to_path_buf();
    for (argument, path) in [("--k", &args.k), ("--v", &args.v)] {
        if path.is_none() && stdin.named(&args.q)?.extension().is_some_and(|e| e == "npy") {
            let why = "a .npy file holds one tensor, so --q, --k and --v each name a file".to_owned();
            return Err(CliError::Missing { argument, why });
        }
    }
    let q = tensor(&mut stdin, &args.q, "q")?;
    let k = tensor(&mut stdin, &in_q(&args.k), "k")?;
    let v = tensor(&mut stdin, &in_q(&args.v), "v")?;
    // The output to standard output has the format of the queries.
    let out_path = if to_stdout { stdin.named(&args.q)? } else { args.out.clone() };
    let extension = out_path.extension().and_then(|extension| extension.to_str());
    let problem = problem_of(args, layout, &q, &k, &v)?;
    if problem.dtypes.out == DType::Bf16 && extension == Some("npy") {
        return Err(CliError::Argument {
            argument: "--out",
            value: args.out.display().to_string(),
            accepted: "a .safetensors file, since NumPy has no bf16".to_owned(),
        });
    }
    let inputs = Inputs::of(q.values, k.values, v.values);
    let Choice { plan, kept } = plan_of(args, &problem)?;
    let (out, lse) = inputs.attention(&problem, &plan)?;
    let [b, h, s, d] = problem.extents(problem::Tensor::Out);
    let shape = match layout {
        Layout::Bhsd => vec![b, h, s, d],
        Layout::Bshd => vec![b, s, h, d],
    };
    let chosen = match (&args.plan, kept) {
        (Some(_), _) => "given",
        (None, Some(_)) => "kept",
        (None, None) => "default",
    };
    terminal::detail(format_args!("plan ({chosen}): {}", json!(plan)));
    let told = json!({
        "out": args.out, "shape": shape, "dtype": problem.dtypes.out.to_string(),
        "plan": plan, "plan_source": chosen,
    });
    let mut tensors = BTreeMap::from([("out".to_owned(), Tensor { values: out, shape })]);
    if extension == Some("safetensors") {
        tensors.insert("lse".to_owned(), Tensor { values: Values::F32(lse), shape: vec![b, h, s] });
    }
    store::write(&args.out, &encode(&out_path, &tensors)?)?;
    if args.json {
        unless_closed(terminal::out().json("run", &told).map_err(CliError::from))?;
    }
    Ok(Status::Passed)
}

/// The plan: the one of `--plan`, else the one that is kept for this problem on this machine, else the
/// default.
fn plan_of(args: &Run, problem: &Problem) -> Result<Choice, CliError> {
    let Some(file) = &args.plan else { return Ok(kept::chosen(problem, cpu::threads())) };
    let plan = plan::native("--plan", &file.display().to_string(), &store::read_text(file)?)?;
    plan.check(problem)?;
    Ok(Choice { plan, kept: None })
}

/// Standard input, which is read once, however many tensors come from it.
#[derive(Default)]
struct Stdin(Option<Vec<u8>>);

impl Stdin {
    fn bytes(&mut self) -> Result<&[u8], CliError> {
        if self.0.is_none() {
            let mut bytes = Vec::new();
            let read = std::io::stdin().lock().read_to_end(&mut bytes);
            read.map_err(|source| CliError::Read { path: "-".into(), source })?;
            self.0 = Some(bytes);
        }
        Ok(self.0.as_deref().unwrap_or_default())
    }

    /// The path itself, or for `-` a name whose extension is the format of the bytes on standard input.
    fn named(&mut self, path: &Path) -> Result<PathBuf, CliError> {
        if !store::is_standard(path) {
            return Ok(path.to_path_buf());
        }
        let is_npy = self.bytes()?.starts_with(b"\x93NUMPY");
        Ok(PathBuf::from(if is_npy { "stdin.npy" } else { "stdin.safetensors" }))
    }
}

fn tensor(stdin: &mut Stdin, path: &Path, name: &'static str) -> Result<Tensor, CliError> {
    let tensor = match store::is_standard(path) {
        true if stdin.bytes()?.is_empty() => {
            return Err(CliError::Argument {
                argument: name,
                value: "-".to_owned(),
                accepted: "a .npy or .safetensors file on standard input, which is empty".to_owned(),
            });
        }
        true => parse(&stdin.named(path)?, stdin.bytes()?, name)?,
        false => load(path, name)?,
    };
    if tensor.shape.len() != 4 {
        return Err(CliError::Rank { tensor: name, shape: tensor.shape });
    }
    Ok(tensor)
}

fn problem_of(args: &Run, layout: Layout, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Problem, CliError> {
    // [batch, heads, sequence, dim]
    let extents = |t: &Tensor| match layout {
        Layout::Bhsd => [t.shape[0], t.shape[1], t.shape[2], t.shape[3]],
        Layout::Bshd => [t.shape[0], t.shape[2], t.shape[1], t.shape[3]],
    };
    let (a, b, c) = (extents(q), extents(k), extents(v));
    let misfit = |tensor, t: &Tensor, other, o: &Tensor, rule| CliError::Shapes {
        tensor,
        shape: t.shape.clone(),
        other,
        expected: o.shape.clone(),
        rule,
    };
    for (tensor, t) in [("k", k), ("v", v)] {
        let (dtype, expected) = (t.dtype(), q.dtype());
        // The types of 8-bit inputs may differ; `Problem::check` says which are accepted.
        if dtype != expected && !expected.is_fp8() {
            return Err(CliError::DTypes { tensor, dtype, expected });
        }
    }
    if a[0] != b[0] || a[3] != b[3] {
        return Err(misfit("k", k, "q", q, "batch and head dim must agree"));
    }
    if b[..3] != c[..3] {
        return Err(misfit("v", v, "k", k, "batch, heads and sequence must agree"));
    }
    let [q, k, v] = [q, k, v].map(Tensor::dtype);
    let dtypes = DTypes { q, k, v, ..v.into() };
    let problem = Problem {
        heads_kv: b[1],
        seq_kv: b[2],
        head_dim_v: c[3],
        band: band_of(args)?,
        score: Score { scale: args.scale, softcap: args.softcap, ..Score::default() },
        ..Problem::new(a[0], a[1], a[2], a[3], dtypes)
    };
    let problem = problem.with_layout(layout);
    problem.check()?;
    Ok(problem)
}

/// The mask that the options state.
fn band_of(args: &Run) -> Result<Band, CliError> {
    let causal = match (args.causal, args.causal_top_left) {
        (true, _) => Band::CAUSAL,
        (_, true) => Band::CAUSAL_TOP_LEFT,
        _ => Band::FULL,
    };
    let Some(window) = &args.window else { return Ok(causal) };
    let refused = || CliError::Argument {
        argument: "--window",
        value: window.clone(),
        accepted: "BEFORE,AFTER, each a number of keys or inf, as in 127,0".to_owned(),
    };
    let bound = |keys: &str| match keys.trim() {
        "inf" => Ok(None),
        keys => keys.parse().map(Some).map_err(|_| refused()),
    };
    let (before, after) = window.split_once(',').ok_or_else(refused)?;
    let (before, after) = (bound(before)?, bound(after)?);
    if causal.is_causal() && after != Some(0) {
        let mask = if args.causal { "--causal" } else { "--causal-top-left" };
        return Err(CliError::Argument {
            argument: "--window",
            value: window.clone(),
            accepted: format!("BEFORE,0 with {mask}, under which a query sees no later key"),
        });
    }
    Ok(Band { before, after, ..causal }.aligned(causal.corner))
}
