//! Reads a kernel file and its launch file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use check::launchfile::{Bound, Brief, LaunchError, LaunchSpec, suggest, suggest_triton};
use check::names::demangle;
use check::sources::Sources;
use host::cuda::{Source, compile_files, example_instance, templates};
use host::store::{self, read_text};
use host::tools::{Compiled, NvrtcError};
use host::triton;
use ptx::{LeftOut, Target, TargetSuffix, Verified};

use crate::args::{Compiling, Stated};
use crate::error::CliError;
use crate::unjudged::Unjudged;

/// A kernel file and how it becomes a module.
#[derive(Clone, Copy)]
pub struct Origin<'a> {
    /// PTX or CUDA C++; `-` is PTX from standard input.
    pub file: &'a Path,
    /// PTX for an architecture older than this is treated as code for it, as a driver would compile it. CUDA
    /// C++ is compiled for it.
    pub sm: Option<Target>,
    pub compiling: &'a Compiling,
    /// A second kernel file, to which the options also apply.
    pub beside: Option<&'a Path>,
}

/// The language of a kernel file, by its name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Language {
    Ptx,
    Cuda,
    Triton,
}

impl Language {
    /// `None` for a file that no command reads.
    fn of(file: &Path) -> Option<Language> {
        match file.extension().and_then(|extension| extension.to_str()) {
            _ if store::is_standard(file) => Some(Language::Ptx),
            Some("ptx") => Some(Language::Ptx),
            Some("cu") => Some(Language::Cuda),
            _ => triton_function(file).map(|_| Language::Triton),
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Language::Ptx => "PTX",
            Language::Cuda => "CUDA C++",
            Language::Triton => "a Triton kernel",
        }
    }
}

/// Where a launch is stated, which its errors name.
#[derive(Clone, Copy)]
enum Stating<'a> {
    File(&'a Path),
    /// The values of `--arg`.
    Options(&'a [String]),
}

impl Stating<'_> {
    fn refuse(self, error: LaunchError, kernel: &Path) -> CliError {
        let error = Box::new(error);
        match self {
            _ if *error == LaunchError::NoEntry => CliError::Launch { path: kernel.to_path_buf(), error },
            Stating::File(path) => CliError::Launch { path: path.to_path_buf(), error },
            Stating::Options(args) => CliError::Stated { error, args: args.to_vec() },
        }
    }
}

/// The kernels of a file.
struct Kernels {
    module: Verified,
    /// The PTX.
    text: String,
    /// The requested template instances, and their names in the PTX.
    names: BTreeMap<String, String>,
    /// Functions that were omitted, because they use a feature that the emulator does not support.
    left_out: Vec<LeftOut>,
    /// Dynamic shared memory of a Triton kernel in bytes.
    shared: Option<u32>,
}

impl Origin<'_> {
    /// Reads the kernel and binds it to its launch file (`-`: from standard input). The returned text is the
    /// PTX to which line numbers refer.
    pub fn load(&self, launch: &Path) -> Result<(Bound, String), CliError> {
        if store::is_standard(self.file) && store::is_standard(launch) {
            return Err(CliError::Argument {
                argument: "--launch",
                value: "-".to_owned(),
                accepted: "a file, since the kernel is read from standard input".to_owned(),
            });
        }
        let stating = Stating::File(launch);
        let spec: LaunchSpec =
            read_text(launch)?.parse().map_err(|error| stating.refuse(error, self.file))?;
        let folder = if store::is_standard(launch) { None } else { launch.parent() };
        self.bind(spec, folder.unwrap_or(Path::new(".")), stating)
    }

    /// Like [`Origin::load`], for a launch that the command line states.
    pub fn load_stated(&self, stated: &Stated) -> Result<(Bound, String), CliError> {
        if stated.grid.is_empty() {
            return Err(CliError::Missing {
                argument: "--launch",
                why: "state the launch in a file, or by --grid, --block and --arg; --suggest writes a first launch file"
                    .to_owned(),
            });
        }
        let brief = Brief {
            entry: stated.entry.clone(),
            grid: stated.grid.clone(),
            block: stated.block.clone(),
            cluster: stated.cluster.clone(),
            dynamic_shared: stated.dynamic_shared,
            cooperative: stated.cooperative,
            args: stated.arg.clone(),
        };
        let stating = Stating::Options(&stated.arg);
        let spec = brief.spec().map_err(|error| stating.refuse(error, self.file))?;
        self.bind(spec, Path::new("."), stating)
    }

    /// Rejects an option about a language in which no kernel is written. The reference kernels are compiled
    /// with the options about the source, but not with those about instances and further files.
    fn understood(&self, references: &[&str]) -> Result<(), CliError> {
        let files = || std::iter::once(self.file).chain(self.beside);
        let Some(language) = Language::of(self.file) else { return Ok(()) };
        let has = |language| files().any(|file| Language::of(file) == Some(language));
        let is_cuda = has(Language::Cuda);
        let compiles =
            is_cuda || references.iter().any(|file| Language::of(Path::new(file)) == Some(Language::Cuda));
        let c = self.compiling;
        let options = [
            ("--std", c.standard.is_some(), compiles, Language::Cuda),
            ("--include", !c.include.is_empty(), compiles, Language::Cuda),
            ("--define", !c.define.is_empty(), compiles, Language::Cuda),
            ("--instantiate", !c.instantiate.is_empty(), is_cuda, Language::Cuda),
            ("--with", !c.others.is_empty(), is_cuda, Language::Cuda),
            ("--signature", !c.signature.is_empty(), has(Language::Triton), Language::Triton),
            ("--constexpr", !c.constexpr.is_empty(), has(Language::Triton), Language::Triton),
            ("--num-warps", c.num_warps.is_some(), has(Language::Triton), Language::Triton),
            ("--num-stages", c.num_stages.is_some(), has(Language::Triton), Language::Triton),
        ];
        let lost = options.into_iter().find(|(_, given, applies, _)| *given && !applies);
        lost.map_or(Ok(()), |(argument, _, _, of)| {
            let (of, is) = (of.name(), language.name());
            Err(CliError::OtherLanguage { argument, of, path: self.file.to_path_buf(), is })
        })
    }

    /// Proposes a launch file for the kernel.
    pub fn suggest(&self, entry: Option<&str>) -> Result<String, CliError> {
        self.understood(&[])?;
        if let Some((file, function)) = triton_function(self.file) {
            read_text(&file)?;
            return Ok(suggest_triton(&triton::signature(&file, &function)?));
        }
        let Kernels { module, names, .. } = self.module(None)?;
        let entry = entry.map(|entry| names.get(entry).map_or(entry, String::as_str));
        let sources =
            if Language::of(self.file) == Some(Language::Cuda) { self.sources()? } else { Vec::new() };
        suggest(&module, entry, &sources).map_err(|error| Stating::Options(&[]).refuse(error, self.file))
    }

    /// Reads the files of a launch, among them the reference kernels, and binds it.
    fn bind(
        &self,
        mut spec: LaunchSpec,
        folder: &Path,
        stating: Stating<'_>,
    ) -> Result<(Bound, String), CliError> {
        let refuse = |error| stating.refuse(error, self.file);
        self.understood(&spec.reference_kernels().collect::<Vec<_>>())?;
        if let Some(language) = Language::of(self.file).filter(|language| *language != Language::Triton) {
            spec.without_constants(language.name()).map_err(refuse)?;
        }
        let Kernels { module, text, names, left_out, shared } = self.module(Some(&spec))?;
        if let Some(shared) = shared {
            let parameters = module.entries().map(|entry| entry.params.len()).max().unwrap_or(0);
            spec.complete_triton(shared, parameters);
        }
        for step in &mut spec.launches {
            // The launch may name a template instance as `--instantiate` does.
            if let Some(name) = step.entry.as_ref().and_then(|entry| names.get(entry)) {
                step.entry = Some(name.clone());
            }
        }
        // The launch may also name an entry as the source does.
        let chosen = |name: &str| {
            let is = |entry: &str| entry == name || entry == demangle(name);
            spec.launches.iter().any(|step| step.entry.as_deref().is_some_and(is))
        };
        let is_only = module.entries().next().is_none();
        if let Some(left_out) = left_out.into_iter().find(|left_out| is_only || chosen(&left_out.function)) {
            let sources = Sources::new(text, self.file.parent());
            return Err(CliError::Unknown(Box::new(Unjudged::new(self.file, left_out, &sources))));
        }
        spec.read_files(folder).map_err(refuse)?;
        let mut references = Vec::new();
        let Compiling { standard, include, define, .. } = self.compiling;
        let (standard, include, define) = (standard.clone(), include.clone(), define.clone());
        // The options about instances and further files apply to the checked kernel only.
        let compiling = Compiling { standard, include, define, ..Compiling::default() };
        for file in spec.reference_kernels() {
            let origin =
                Origin { file: &folder.join(file), compiling: &compiling, sm: self.sm, beside: None };
            references.push(origin.module(None)?.module);
        }
        Ok((spec.bind_with(module, &references, folder).map_err(refuse)?, text))
    }

    /// The module and its PTX. Triton compiles a kernel for the types of the arguments in `spec`.
    fn module(&self, spec: Option<&LaunchSpec>) -> Result<Kernels, CliError> {
        let file = self.file;
        let mut names = BTreeMap::new();
        let mut shared = None;
        let text = match file.extension().and_then(|e| e.to_str()) {
            _ if store::is_standard(file) => read_text(file)?,
            Some("ptx") => read_text(file)?,
            Some("cu") => {
                let compiled = self.compile()?;
                names = compiled.names;
                compiled.ptx
            }
            _ => match (triton_function(file), spec) {
                (Some((file, function)), Some(spec)) => {
                    let compiled = self.compile_triton(file, function, spec)?;
                    shared = Some(compiled.shared);
                    compiled.ptx
                }
                _ => return Err(CliError::Extension(file.to_path_buf())),
            },
        };
        let (module, left_out) =
            ptx::parse_known(&text).map_err(|error| CliError::Parse { path: file.to_path_buf(), error })?;
        let target = module.target;
        let mut module = module
            .verify()
            .map_err(|violations| CliError::Verify { path: file.to_path_buf(), violations })?;
        if let Some(device) = self.sm {
            module = module.for_device(device.sm).ok_or_else(|| {
                let accepted = match target.suffix {
                    TargetSuffix::None => {
                        format!("{} or later, for which {} was written", target.sm, file.display())
                    }
                    _ => format!("{}: {} was written for {target}", target.sm, file.display()),
                };
                CliError::Argument { argument: "--sm", value: device.sm.to_string(), accepted }
            })?;
        }
        Ok(Kernels { module, text, names, left_out, shared })
    }

    fn compile_triton(
        &self,
        file: PathBuf,
        function: String,
        spec: &LaunchSpec,
    ) -> Result<triton::Compiled, CliError> {
        let Compiling { signature, constexpr, num_warps, num_stages, .. } = self.compiling;
        read_text(&file)?;
        let types = match &signature[..] {
            [] => spec.triton_types().map_err(|error| Stating::Options(&[]).refuse(error, self.file))?,
            given => given.iter().map(|ty| ty.trim().to_owned()).collect(),
        };
        let sm = self.sm.map_or(80, |target| target.sm);
        let constants = spec.triton_constants(constexpr);
        let request =
            triton::Request { file, function, types, constants, warps: *num_warps, stages: *num_stages, sm };
        Ok(request.compile()?)
    }

    /// The CUDA C++ files.
    fn sources(&self) -> Result<Vec<Source>, CliError> {
        let files = std::iter::once(self.file).chain(self.compiling.others.iter().map(PathBuf::as_path));
        files.map(|file| Ok(Source { file: file.to_path_buf(), text: read_text(file)? })).collect()
    }

    fn compile(&self) -> Result<Compiled, CliError> {
        let Compiling { standard, include, define, instantiate, .. } = self.compiling;
        let sources = self.sources()?;
        let target = self.sm.unwrap_or(Target::sm(80)).to_string();
        let options = host::cuda::Options {
            arch: target.replace("sm_", "compute_"),
            standard: standard.clone(),
            include: include.clone(),
            define: define.clone(),
            instantiate: instantiate.clone(),
        };
        let compiled = compile_files(&sources, &options).map_err(|error| self.refused(error))?;
        if !compiled.ptx.contains(".entry") {
            let (templates, launched) = templates(&sources);
            if let Some(first) = templates.first() {
                // A launch inside another template names that template's parameters, not types.
                let concrete = |name: &&String| !name.contains("<T");
                let example = launched.iter().find(concrete).cloned();
                let example = example.or_else(|| example_instance(&sources, first));
                let example = example.unwrap_or_else(|| format!("{first}<float>"));
                return Err(CliError::Templates {
                    path: self.file.to_path_buf(),
                    templates: ptx::quote::list(&templates),
                    example,
                });
            }
        }
        Ok(compiled)
    }
}

impl Origin<'_> {
    /// An error of NVRTC. One about an argument names the argument.
    fn refused(&self, error: NvrtcError) -> CliError {
        let NvrtcError::Source(said) = &error else { return error.into() };
        let instances = &self.compiling.instantiate;
        if let Some(target) = self.sm.filter(|_| said.contains("invalid value for --gpu-architecture")) {
            let accepted =
                "an architecture that the installed NVRTC compiles for, such as 80, 89 or 90a".to_owned();
            let value = target.to_string().replace("sm_", "");
            return CliError::Argument { argument: "--sm", value, accepted };
        }
        // NVRTC compiles the requested instances as a file of its own.
        if said.trim_start().starts_with("__nv_name_map") && !instances.is_empty() {
            let accepted = format!("an instance of a kernel of the source; NVRTC says:\n{said}");
            return CliError::Argument { argument: "--instantiate", value: instances.join("; "), accepted };
        }
        error.into()
    }
}

/// Splits `FILE.py:FUNCTION` into the file and the function.
fn triton_function(file: &Path) -> Option<(PathBuf, String)> {
    let (file, function) = file.to_str()?.rsplit_once(':')?;
    file.ends_with(".py").then(|| (PathBuf::from(file), function.to_owned()))
}

/// Rejects a file for `--keep-ptx` that cannot be written, before the kernel is run.
pub fn keepable(file: Option<&Path>, inputs: &[(&'static str, &Path)]) -> Result<(), CliError> {
    let Some(file) = file else { return Ok(()) };
    if store::is_standard(file) {
        return Err(CliError::Argument {
            argument: "--keep-ptx",
            value: "-".to_owned(),
            accepted: "a file, since the result is printed to standard output".to_owned(),
        });
    }
    distinct("--keep-ptx", file, inputs)?;
    Ok(store::writable(file)?)
}

/// Rejects `-` as an output file when another output already goes to standard output.
pub fn not_beside_json(argument: &'static str, output: &Path, json: bool) -> Result<(), CliError> {
    if !(json && store::is_standard(output)) {
        return Ok(());
    }
    let accepted = "a file, since --json prints to standard output".to_owned();
    Err(CliError::Argument { argument, value: "-".to_owned(), accepted })
}

/// Rejects an output file that is also an input file, under whatever name: writing it would destroy the
/// input.
pub fn distinct(
    argument: &'static str,
    output: &Path,
    inputs: &[(&'static str, &Path)],
) -> Result<(), CliError> {
    match inputs.iter().find(|(_, input)| same_file(output, input)) {
        None => Ok(()),
        Some((input, source_path)) => Err(CliError::Overwrites {
            argument,
            path: output.to_path_buf(),
            input,
            source_path: source_path.to_path_buf(),
        }),
    }
}

/// Whether two names lead to the same file: by a symbolic link, a hard link or another spelling. Devices and
/// pipes never count as the same, because writing to them destroys nothing.
fn same_file(a: &Path, b: &Path) -> bool {
    let (Ok(found), Ok(other)) = (std::fs::metadata(a), std::fs::metadata(b)) else { return false };
    found.is_file() && other.is_file() && (is_same(&found, &other) || canonical(a) == canonical(b))
}

fn canonical(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf())
}

#[cfg(unix)]
fn is_same(a: &std::fs::Metadata, b: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// On other systems only the canonical names are compared.
#[cfg(not(unix))]
fn is_same(_: &std::fs::Metadata, _: &std::fs::Metadata) -> bool {
    false
}
