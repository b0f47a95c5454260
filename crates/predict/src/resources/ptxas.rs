//! Finds and runs ptxas, NVIDIA's PTX assembler.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use thiserror::Error;

use super::{ResourceSource, Resources};

/// NVIDIA's PTX assembler, run as a program.
#[derive(Clone, Debug)]
pub struct Ptxas {
    path: PathBuf,
    version: String,
}

/// Why ptxas gave no figures.
#[derive(Debug, Error)]
pub enum PtxasError {
    #[error(
        "ptxas was not found: set FLASHCORE_PTXAS to its path, put it on PATH, or install it with \
    `pip install nvidia-cuda-nvcc`"
    )]
    NotFound,
    #[error("{path}: {reason}")]
    NotUsable { path: PathBuf, reason: String },
    #[error("ptxas cannot assemble for {arch}:\n{message}")]
    Rejected { arch: String, message: String },
    #[error("the output of ptxas has no entry `{0}`")]
    NoSuchEntry(String),
}

impl Ptxas {
    /// The ptxas at `path`.
    ///
    /// # Errors
    /// The program does not run or is not ptxas.
    pub fn at(path: &Path) -> Result<Ptxas, PtxasError> {
        let unusable = |reason: String| PtxasError::NotUsable { path: path.to_owned(), reason };
        let output = Command::new(path).arg("--version").output().map_err(|e| unusable(e.to_string()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text.split_whitespace().find(|w| w.starts_with('V') && w.contains('.'));
        match version {
            Some(v) if text.contains("ptx") => {
                Ok(Ptxas { path: path.to_owned(), version: v[1..].to_owned() })
            }
            _ => Err(unusable("not ptxas".to_owned())),
        }
    }

    /// Searches the environment variable `FLASHCORE_PTXAS`, `.tools` in the working directory and the
    /// directories above it, and `PATH`, in that order.
    ///
    /// # Errors
    /// There is no ptxas, or the one named by the environment variable is not usable.
    pub fn find() -> Result<Ptxas, PtxasError> {
        if let Some(path) = std::env::var_os("FLASHCORE_PTXAS").filter(|p| !p.is_empty()) {
            return Ptxas::at(Path::new(&path));
        }
        let here = std::env::current_dir().unwrap_or_default();
        let tools = here.ancestors().flat_map(|dir| {
            let tools = dir.join(".tools");
            [tools.join("ptxas"), tools.join("bin/ptxas"), tools.join("nvidia/cu13/bin/ptxas")]
        });
        let path = std::env::var_os("PATH").unwrap_or_default();
        let on_path = std::env::split_paths(&path).map(|dir| dir.join("ptxas"));
        let candidate = tools.chain(on_path).find(|p| p.is_file());
        candidate.map_or(Err(PtxasError::NotFound), |path| Ptxas::at(&path))
    }

    /// The version, for example `13.0.88`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Assembles PTX for an architecture (`sm_89`) and returns the resources of the entry.
    ///
    /// # Errors
    /// ptxas rejects the text, or the module does not have the entry.
    pub fn resources(&self, ptx: &str, arch: &str, entry: &str) -> Result<Resources, PtxasError> {
        self.run(ptx, arch, entry, Path::new("/dev/null"))
    }

    /// Like [`Ptxas::resources`], and also returns the machine code as a cubin. Equal code gives an equal
    /// cubin.
    ///
    /// # Errors
    /// As for [`Ptxas::resources`], or the temporary file cannot be read.
    pub fn assemble(&self, ptx: &str, arch: &str, entry: &str) -> Result<(Resources, Vec<u8>), PtxasError> {
        let mut output = TempFile::new().map_err(|e| self.unusable(&e))?;
        let resources = self.run(ptx, arch, entry, &output.path)?;
        let mut code = Vec::new();
        output.file.read_to_end(&mut code).map_err(|e| self.unusable(&e))?;
        Ok((resources, code))
    }

    fn unusable(&self, error: &std::io::Error) -> PtxasError {
        PtxasError::NotUsable { path: self.path.clone(), reason: error.to_string() }
    }

    fn run(&self, ptx: &str, arch: &str, entry: &str, output: &Path) -> Result<Resources, PtxasError> {
        let unusable = |e: std::io::Error| self.unusable(&e);
        // From a pipe ptxas first copies its input to a named file, which stays when ptxas is killed.
        let mut input = TempFile::new().map_err(unusable)?;
        input.file.write_all(ptx.as_bytes()).map_err(unusable)?;
        let mut command = Command::new(&self.path);
        command.args(["-v", "-arch", arch, "-o"]).arg(output).arg(&input.path).stdin(Stdio::null());
        let output = command.output().map_err(unusable)?;
        let text =
            String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            let message = text.trim().replace(&*input.path.to_string_lossy(), "<PTX>");
            return Err(PtxasError::Rejected { arch: arch.to_owned(), message });
        }
        let source = ResourceSource::Ptxas(self.version.clone());
        parse(&text, entry, source).ok_or_else(|| PtxasError::NoSuchEntry(entry.to_owned()))
    }
}

/// A temporary file that a child process reads or writes. On Linux it has no name, so nothing is left when
/// this process ends while the child runs, as at the end of a search.
struct TempFile {
    file: File,
    path: PathBuf,
}

impl TempFile {
    fn new() -> std::io::Result<TempFile> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!("flashcore-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        // Neither follows a link nor opens a file of another process.
        let file = match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return TempFile::new(),
            file => file?,
        };
        #[cfg(target_os = "linux")]
        let path = {
            use std::os::fd::AsRawFd;
            std::fs::remove_file(&path)?;
            PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()))
        };
        Ok(TempFile { file, path })
    }
}

#[cfg(not(target_os = "linux"))]
impl Drop for TempFile {
    fn drop(&mut self) {
        // If the removal fails, the operating system clears the temporary directory.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Parses the output of `ptxas -v` for one entry.
fn parse(text: &str, entry: &str, source: ResourceSource) -> Option<Resources> {
    let mut lines = text.lines().skip_while(|l| !l.contains(&format!("Compiling entry function '{entry}'")));
    lines.next()?;
    let of_entry: Vec<&str> = lines.take_while(|l| !l.contains("Compiling entry function")).collect();
    let before = |unit: &str| {
        let line = of_entry.iter().find(|l| l.contains(unit))?;
        line[..line.find(unit)?].split([' ', ',']).rfind(|w| !w.is_empty())?.parse::<u32>().ok()
    };
    Some(Resources {
        registers: before(" registers")?,
        spill_stores: before(" bytes spill stores").unwrap_or(0),
        spill_loads: before(" bytes spill loads").unwrap_or(0),
        stack: before(" bytes stack frame").unwrap_or(0),
        shared: before(" bytes smem").unwrap_or(0),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "ptxas info    : 0 bytes gmem\n\
        ptxas info    : Compiling entry function 'other' for 'sm_89'\n\
        ptxas info    : Used 9 registers, used 0 barriers, 352 bytes cmem[0]\n\
        ptxas info    : Compiling entry function 'attend' for 'sm_89'\n\
        ptxas info    : Function properties for attend\n\
        \x20   8192 bytes stack frame, 24 bytes spill stores, 16 bytes spill loads\n\
        ptxas info    : Used 255 registers, used 1 barriers, 8192 bytes cumulative stack size, 28672 bytes smem\n";

    #[test]
    fn reads_the_report_of_the_entry_asked_for() {
        let of = |entry| parse(TEXT, entry, ResourceSource::Ptxas("13.0".into()));
        let found = of("attend").map(|r| (r.registers, r.spill_stores, r.spill_loads, r.stack, r.shared));
        assert_eq!(found, Some((255, 24, 16, 8192, 28672)));
        assert_eq!(of("other").map(|r| (r.registers, r.shared)), Some((9, 0)));
        assert_eq!(of("absent"), None);
    }

    #[test]
    fn a_missing_program_is_an_error() {
        assert!(matches!(Ptxas::at(Path::new("/nonexistent/ptxas")), Err(PtxasError::NotUsable { .. })));
    }
}
