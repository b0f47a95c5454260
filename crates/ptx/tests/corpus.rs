//! Real PTX from NVRTC and Triton: each text parses, verifies and survives a round trip through the printer,
//! and ptxas accepts the printed text.

mod ptxas;

use std::path::Path;
use std::sync::Arc;

use flashcore_ptx::{Module, TensorMapSpec, parse};
use libtest_mimic::{Arguments, Failed, Trial};

/// Judges a kernel by its name.
type Judge = fn(&str) -> Result<(), Failed>;

/// The module; `None` where NVRTC is needed and not installed.
fn read(name: &str) -> Result<Option<Module>, Failed> {
    let module = filetest::corpus(name).map(|text| parse(&text)).transpose();
    Ok(module.map_err(|e| format!("{name}: {e}"))?)
}

fn round_trip(name: &str) -> Result<(), Failed> {
    let Some(module) = read(name)? else { return Ok(()) };
    let printed = module.to_string();
    let again = parse(&printed).map_err(|e| format!("printed text: {e}"))?;
    if again != module {
        return Err("the printed text reads back as another module".into());
    }
    Ok(())
}

fn verify(name: &str) -> Result<(), Failed> {
    let Some(module) = read(name)? else { return Ok(()) };
    let suffix = module.target.to_string();
    if !name.ends_with(&suffix.replace('_', "")) {
        return Err(format!("has the target {suffix}").into());
    }
    module.check()?;
    let minimum = module.minimum_version();
    if minimum > module.version {
        return Err(format!("needs {minimum} but has {}", module.version).into());
    }
    let target = module.target;
    let verified = module.verify()?;
    for sm in [80, 89, 90, 100, 103, 120] {
        match verified.clone().for_device(sm) {
            Some(compiled) if target.runs_on(sm) => compiled.check()?,
            None if !target.runs_on(sm) => {}
            _ => return Err(format!("sm_{sm} for code of {target}").into()),
        }
    }
    Ok(())
}

/// The launch file matches the kernel: one argument per parameter with the parameter's size, and no more
/// threads than the kernel allows.
fn launch(name: &str) -> Result<(), Failed> {
    let Some(module) = read(name)? else { return Ok(()) };
    let base = name.rsplit_once("_sm").map_or(name, |(base, _)| base);
    let path = filetest::root().join("corpus").join(base).with_extension("toml");
    let file: toml::Table = std::fs::read_to_string(path)?.parse()?;
    let launch = &file["launch"];
    let entry = launch["entry"].as_str().and_then(|name| module.function(name)).ok_or("no such entry")?;
    let arguments = file["arg"].as_array().ok_or("`arg` is a list")?;
    if arguments.len() != entry.params.len() {
        return Err(format!("{} arguments for {} parameters", arguments.len(), entry.params.len()).into());
    }
    for (argument, param) in arguments.iter().zip(&entry.params) {
        let bytes = match argument["role"].as_str() {
            Some("u32" | "i32" | "f32") => 4,
            Some("tensor_map") => TensorMapSpec::BYTES,
            _ => 8,
        };
        if bytes != param.bytes() {
            return Err(format!("`{}` has {} bytes, the argument {bytes}", param.name, param.bytes()).into());
        }
    }
    let block = launch["block"].as_array().ok_or("`block` is a list")?;
    let threads: i64 = block.iter().filter_map(toml::Value::as_integer).product();
    let bounds = &entry.bounds;
    let product = |extents: [u32; 3]| extents.iter().map(|&e| i64::from(e)).product::<i64>();
    if bounds.required_threads.is_some_and(|e| product(e) != threads)
        || bounds.max_threads.is_some_and(|e| product(e) < threads)
    {
        return Err(format!("{threads} threads do not fit {bounds}").into());
    }
    Ok(())
}

fn assemble(name: &str, ptxas: &Path) -> Result<(), Failed> {
    let Some(module) = read(name)? else { return Ok(()) };
    Ok(ptxas::assemble(ptxas, &module.to_string(), module.target)?)
}

fn main() {
    let arguments = Arguments::from_args();
    let ptxas = ptxas::find().map(Arc::new);
    let mut trials = Vec::new();
    let judges: [(&str, Judge); 3] = [("launch", launch), ("verify", verify), ("round_trip", round_trip)];
    for name in filetest::corpus_names() {
        for (what, judge) in judges {
            let own = name.clone();
            trials.push(Trial::test(format!("{what}/{name}"), move || judge(&own)));
        }
        if let Some(ptxas) = ptxas.clone() {
            trials.push(Trial::test(format!("ptxas/{name}"), move || assemble(&name, &ptxas)));
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}
