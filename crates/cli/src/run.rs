//! `flashcore run`: attention on tensors in files.

use std::collections::BTreeMap;
use std::path::Path;

use cpu::CpuPlan;
use lab::files::{Tensor, load, save};
use lab::store;
use lab::values::{Inputs, Values};
use problem::{DType, Layout, Mask, Problem};

use crate::Status;
use crate::args::Run;
use crate::error::CliError;

pub fn run(args: &Run) -> Result<Status, CliError> {
    let layout: Layout = args.layout.parse()?;
    let extension = args.out.extension().and_then(|extension| extension.to_str());
    if !matches!(extension, Some("npy" | "safetensors")) {
        return Err(CliError::Argument {
            argument: "--out",
            value: args.out.display().to_string(),
            accepted: "a .npy or a .safetensors file".to_owned(),
        });
    }
    store::writable(&args.out)?;
    let in_q = |path: &Option<std::path::PathBuf>| path.as_deref().unwrap_or(&args.q).to_path_buf();
    for (argument, path) in [("--k", &args.k), ("--v", &args.v)] {
        if path.is_none() && args.q.extension().is_some_and(|e| e == "npy") {
            let accepted =
                "a file; a .npy file holds one tensor, so --k and --v are needed beside it".to_owned();
            return Err(CliError::Argument { argument, value: "(missing)".into(), accepted });
        }
    }
    let (q, k, v) = (tensor(&args.q, "q")?, tensor(&in_q(&args.k), "k")?, tensor(&in_q(&args.v), "v")?);
    let problem = problem_of(args, layout, &q, &k, &v)?;
    if problem.dtype == DType::Bf16 && extension == Some("npy") {
        return Err(CliError::Argument {
            argument: "--out",
            value: args.out.display().to_string(),
            accepted: "a .safetensors file, since NumPy has no bf16".to_owned(),
        });
    }
    let inputs = Inputs { q: q.values, k: k.values, v: v.values };
    let (out, lse) = inputs.attention(&problem, &CpuPlan::for_problem(&problem))?;
    let [b, h, s, d] = problem.extents(problem::Tensor::Out);
    let shape = match layout {
        Layout::Bhsd => vec![b, h, s, d],
        Layout::Bshd => vec![b, s, h, d],
    };
    let mut tensors = BTreeMap::from([("out".to_owned(), Tensor { values: out, shape })]);
    if args.out.extension().is_some_and(|e| e == "safetensors") {
        tensors.insert("lse".to_owned(), Tensor { values: Values::F32(lse), shape: vec![b, h, s] });
    }
    save(&args.out, &tensors)?;
    Ok(Status::Proven)
}

fn tensor(path: &Path, name: &'static str) -> Result<Tensor, CliError> {
    let tensor = load(path, name)?;
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
        let (dtype, expected) = (t.values.dtype(), q.values.dtype());
        if dtype != expected {
            return Err(CliError::DTypes { tensor, dtype, expected });
        }
    }
    if a[0] != b[0] || a[3] != b[3] {
        return Err(misfit("k", k, "q", q, "batch and head dim must agree"));
    }
    if b[..3] != c[..3] {
        return Err(misfit("v", v, "k", k, "batch, heads and sequence must agree"));
    }
    let problem = Problem {
        heads_kv: b[1],
        seq_kv: b[2],
        head_dim_v: c[3],
        mask: match (args.causal, args.causal_top_left) {
            (true, _) => Mask::Causal,
            (_, true) => Mask::CausalTopLeft,
            _ => Mask::None,
        },
        scale: args.scale,
        ..Problem::new(a[0], a[1], a[2], a[3], q.values.dtype())
    };
    let problem = problem.with_layout(layout);
    problem.check()?;
    Ok(problem)
}
