//! Prints the PTX of a plan: `emit PROBLEM.json PLAN.json SM`, both as their serde forms; `default` for the plan that
//! FlashCore would take, `D,DTYPE,MASK` for a problem of the mission's size.

use std::error::Error;

use flashcore_kernels::{Arch, Plan, emit};
use problem::{DType, Mask, Problem};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [problem, plan, sm] = &args[..] else {
        return Err("usage: emit PROBLEM PLAN SM".into());
    };
    let arch = Arch::of(sm.parse()?).ok_or("SM: one of 80, 86, 89, 90, 120")?;
    let problem: Problem = match problem.split(',').collect::<Vec<_>>()[..] {
        [dim, dtype, mask] if !problem.starts_with('{') => {
            let dtype: DType = dtype.parse()?;
            Problem::new(16, 16, 2048, dim.parse()?, dtype).with_mask(mask.parse::<Mask>()?)
        }
        _ => serde_json::from_str(problem)?,
    };
    let plan = match plan.as_str() {
        "default" => Plan::default_for(&problem, &arch)?,
        json => serde_json::from_str(json)?,
    };
    eprintln!("{}", serde_json::to_string(&plan)?);
    print!("{}", emit(&problem, &plan, &arch)?.module);
    Ok(())
}
