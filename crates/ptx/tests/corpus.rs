//! Real PTX from NVRTC and Triton: each text parses, verifies and survives a round trip through the printer,
//! and ptxas accepts the printed text.

mod ptxas;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use flashcore_ptx::{Module, TensorMapSpec, parse};
use libtest_mimic::{Arguments, Failed, Trial};

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests/corpus")
}

fn read(path: &Path) -> Result<Module, Failed> {
    let text = std::fs::read_to_string(path)?;
    Ok(parse(&text).map_err(|e| format!("{}: {e}", path.display()))?)
}

fn round_trip(path: &Path) -> Result<(), Failed> {
    let module = read(path)?;
    let printed = module.to_string();
    let again = parse(&printed).map_err(|e| format!("printed text: {e}"))?;
    if again != module {
        return Err("the printed text reads back as another module".into());
    }
    Ok(())
}

fn verify(path: &Path) -> Result<(), Failed> {
    let module = read(path)?;
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
fn launch(path: &Path) -> Result<(), Failed> {
    let module = read(path)?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let base = stem.rsplit_once("_sm").map_or(stem.as_str(), |(base, _)| base);
    let file: toml::Table = std::fs::read_to_string(corpus().join(base).with_extension("toml"))?.parse()?;
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

fn assemble(path: &Path, ptxas: &Path) -> Result<(), Failed> {
    let module = read(path)?;
    Ok(ptxas::assemble(ptxas, &module.to_string(), module.target)?)
}

fn main() {
    let arguments = Arguments::from_args();
    let mut files: Vec<PathBuf> = std::fs::read_dir(corpus())
        .expect("the corpus stands in the repository")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "ptx"))
        .collect();
    files.sort();
    let ptxas = ptxas::find().map(Arc::new);
    let mut trials = Vec::new();
    for file in files {
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let path = file.clone();
        trials.push(Trial::test(format!("launch/{name}"), move || launch(&path)));
        let path = file.clone();
        trials.push(Trial::test(format!("verify/{name}"), move || verify(&path)));
        let path = file.clone();
        trials.push(Trial::test(format!("round_trip/{name}"), move || round_trip(&path)));
        if let Some(ptxas) = ptxas.clone() {
            trials.push(Trial::test(format!("ptxas/{name}"), move || assemble(&file, &ptxas)));
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}
