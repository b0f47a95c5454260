//! Compiling processes. Within one process, the driver compiles one kernel at a time. The results come from
//! the caches.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use kernels::{Plan, emit};
use problem::Problem;
use serde_json::json;

use super::Error;
use super::device::Device;

/// The argument that makes this program a compiling process.
pub const COMPILES: &str = "--compile";

/// A process that compiles a plan for each input line.
pub struct Compiler(Mutex<Child>);

impl Compiler {
    pub fn start() -> Result<Compiler, Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["tune", COMPILES]).stdin(Stdio::piped()).stdout(Stdio::piped());
        Ok(Compiler(Mutex::new(command.spawn()?)))
    }

    /// Returns when the plan is compiled. If the process failed, the caller compiles the plan itself.
    pub fn compile(&self, problem: &Problem, plan: &Plan) {
        let mut child = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Child { stdin: Some(stdin), stdout: Some(stdout), .. } = &mut *child else { return };
        if writeln!(stdin, "{}", json!((problem, plan))).is_ok() {
            let _ = BufReader::with_capacity(1, stdout).read_line(&mut String::new());
        }
    }
}

/// The main loop of the compiling process; it ends with its input.
pub fn serve() -> Result<(), Error> {
    let device = Device::open()?;
    for line in io::stdin().lines() {
        let (problem, plan): (Problem, Plan) = serde_json::from_str(&line?)?;
        if let Ok(program) = emit(&problem, &plan, &device.arch) {
            program.kernels().iter().for_each(|kernel| drop(device.function(kernel, || ())));
        }
        println!();
    }
    Ok(())
}
