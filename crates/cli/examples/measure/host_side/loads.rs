//! The cost of loading a kernel of each family: compiled from PTX, and from the cache in a later process.

use std::time::Instant;

use driver::{Context, Expect, Function};
use kernels::{Arch, Family, emit};
use problem::{Band, DType, Problem};
use serde_json::json;

use super::{Outcome, ensure, tell};

/// Limits on the time to compile a plan and to load it from a cache, ms.
const COMPILED_MS: f64 = 1500.0;
const CACHED_MS: f64 = 20.0;

/// Loads the family's kernels one after the other. With `cached`, another process has loaded them before.
pub fn load(family: &str, cached: bool) -> Outcome {
    let family = Family::named(family).ok_or_else(|| format!("no family {family}"))?;
    let context = Context::open(0)?;
    let (sm, sms) = (context.info().sm(), context.info().sms);
    let arch =
        Arch { multiprocessors: sms, ..Arch::of(sm).ok_or_else(|| format!("sm_{sm} has no kernels"))? };
    let when = if cached { "in a later process" } else { "compiled" };
    let (mut samples, mut slowest) = (Vec::new(), String::new());
    for problem in problems() {
        let Ok(plan) = family.default_for(&problem, &arch) else { continue };
        let began = Instant::now();
        let program = emit(&problem, &plan, &arch)?;
        let load = |kernel: ptx::Kernel| Function::load(&context, &kernel, &Expect::of(&kernel.launch));
        let functions: Vec<Function> = program.kernels().into_iter().map(load).collect::<Result<_, _>>()?;
        let ms = began.elapsed().as_secs_f64() * 1e3;
        let text = format!("{ms:.1} ms: dim {}, S {}", problem.head_dim, problem.seq_q);
        println!("{} {when} {text}, {:?}", family.name(), functions[0].resources());
        if samples.iter().all(|&other| other < ms) {
            slowest = text;
        }
        samples.push(ms);
    }
    ensure(!samples.is_empty(), || format!("{} computes none of the problems", family.name()))?;
    let name = format!("a kernel of {} to loaded, {when}", family.name());
    let limit = if cached { CACHED_MS } else { COMPILED_MS };
    println!("LOADS {}", json!({ "measure": name, "samples": samples }));
    let within =
        ensure(samples.iter().all(|&ms| ms <= limit), || format!("slowest {slowest}; at most {limit} ms"));
    tell(&name, within.map(|()| format!("slowest {slowest}")));
    Ok(())
}

/// Problems that cover every code size of the families.
fn problems() -> Vec<Problem> {
    let mut problems = Vec::new();
    for (seq, heads) in [(512, 8), (4096, 16)] {
        for (dim, mask) in [(64, Band::FULL), (128, Band::CAUSAL), (256, Band::CAUSAL)] {
            problems.push(Problem::new(1, heads, seq, dim, DType::Bf16).with_band(mask));
        }
    }
    problems
}
