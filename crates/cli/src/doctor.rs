//! `flashcore doctor`: what this machine has, and what that enables.

use std::io::Write;

use emu::resources::Ptxas;
use lab::bench::Torch;
use lab::provenance::Provenance;

use crate::Status;
use crate::error::CliError;

pub fn doctor() -> Result<Status, CliError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let provenance = Provenance::of_cpu(std::path::Path::new("."), threads);
    let sets: Vec<&str> = cpu::Isa::available().into_iter().map(cpu::Isa::name).collect();
    let mut out = std::io::stdout().lock();
    let mut line =
        |what: &str, has: String, enables: &str| writeln!(out, "{what:<8} {has}\n         {enables}");
    line(
        "cpu",
        format!("{}; {}", provenance.device, sets.join(", ")),
        "attention runs on native kernels; GPU kernels run in the emulator",
    )?;
    match driver::Gpu::open(0) {
        Ok(_) => line("gpu", "present".into(), "kernels can be measured here")?,
        Err(error) => {
            line("gpu", format!("none ({error})"), "times of GPU kernels are predicted, not measured")?
        }
    }
    match Ptxas::find() {
        Ok(ptxas) => line("ptxas", ptxas.version().into(), "registers and spills are the assembler's own")?,
        Err(error) => line(
            "ptxas",
            format!("none ({error})"),
            "registers are estimated; `cargo xtask tools` fetches it",
        )?,
    }
    match lab::tools::nvrtc() {
        Some(path) => line("nvrtc", path.display().to_string(), "`flashcore check` takes CUDA C++")?,
        None => {
            line("nvrtc", "none".into(), "`flashcore check` takes PTX only; `cargo xtask tools` fetches it")?
        }
    }
    match Torch::start() {
        Ok(torch) => line("torch", torch.version.clone(), "`flashcore bench` races against it")?,
        Err(error) => line("torch", format!("none ({error})"), "`flashcore bench` times our kernels alone")?,
    }
    match provenance.commit {
        Some(commit) => line("commit", commit, "measurements can become evidence")?,
        None => {
            line("commit", "none, or with changes".into(), "measurements are shown but not kept as evidence")?
        }
    }
    Ok(Status::Proven)
}
