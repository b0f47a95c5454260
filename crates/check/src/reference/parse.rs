//! Parses the table `[reference]` of a launch file.

use std::time::Duration;

use super::builtin::{Builtin, Gradient, Operation};
use super::{ReferenceSource, Tolerance};
use crate::launchfile::{
    ARGUMENT, ArgSpec, BufferType, FileInit, Init, LaunchError, LaunchSpec, Memory, RawArg, RawLaunch,
    RawReference, View, number_of, step_of,
};

/// A reference as a launch file states it.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferenceSpec {
    /// The number of the judged argument.
    pub output: usize,
    /// The numbers of the arguments that the source reads.
    pub inputs: Vec<usize>,
    pub source: ReferenceSource,
    pub tolerance: Tolerance,
}

/// Maximum number of operations of a built-in reference: a minute or two.
const WORK_LIMIT: f64 = 1e11;

/// Maximum time limit of a Python function, s.
const TIMEOUT: f64 = 60.0;

impl ReferenceSpec {
    /// Validates all references of a file. Files that they name are added to `files`.
    pub(crate) fn all(
        raw: &[RawReference],
        spec: &LaunchSpec,
        args: &[RawArg],
        files: &mut Vec<FileInit>,
    ) -> Result<Vec<ReferenceSpec>, LaunchError> {
        let many = raw.len() > 1;
        let all = raw.iter().enumerate().map(|(at, one)| {
            let key = if many { format!("reference[{at}]") } else { "reference".to_owned() };
            Parser { key, raw: one, spec, args }.reference(files)
        });
        all.collect()
    }

    /// The file of a reference kernel.
    pub fn kernel_file(&self) -> Option<&str> {
        match &self.source {
            ReferenceSource::Kernel { path, .. } => Some(path),
            _ => None,
        }
    }
}

struct Parser<'a> {
    key: String,
    raw: &'a RawReference,
    spec: &'a LaunchSpec,
    args: &'a [RawArg],
}

impl Parser<'_> {
    fn refuse(&self, key: &str, value: impl ToString, accepted: impl Into<String>) -> LaunchError {
        LaunchError::value(format!("{}.{key}", self.key), value, accepted)
    }

    fn reference(&self, files: &mut Vec<FileInit>) -> Result<ReferenceSpec, LaunchError> {
        let output = self.output()?;
        let memory = self.memory(output);
        let given = [
            self.raw.builtin.is_some(),
            self.raw.kernel.is_some(),
            self.raw.file.is_some(),
            self.raw.python.is_some(),
        ];
        if given.iter().filter(|given| **given).count() != 1 {
            let accepted = "exactly one of `builtin`, `kernel`, `file` and `python`";
            let named =
                ["builtin", "kernel", "file", "python"].into_iter().zip(given).filter(|(_, given)| *given);
            let named: Vec<&str> = named.map(|(name, _)| name).collect();
            return Err(LaunchError::value(&*self.key, format!("keys [{}]", named.join(", ")), accepted));
        }
        let mut inputs = Vec::new();
        let source = if let Some(name) = &self.raw.builtin {
            inputs = self.inputs()?.ok_or_else(|| {
                self.refuse("inputs", "(missing)", "the arguments that the operation reads")
            })?;
            self.builtin(name, &inputs, memory)?
        } else if let Some(path) = &self.raw.kernel {
            self.kernel(path)?
        } else if let Some(path) = &self.raw.file {
            files.push(FileInit {
                key: format!("{}.file", self.key),
                path: path.clone(),
                dtype: memory.dtype,
            });
            ReferenceSource::File { path: path.clone(), file: files.len() - 1 }
        } else {
            inputs = match self.inputs()? {
                Some(inputs) => inputs,
                None => (0..self.spec.args.len()).filter(|&at| at != output && self.is_input(at)).collect(),
            };
            self.python(self.raw.python.as_deref().unwrap_or_default())?
        };
        self.check_keys(&source)?;
        Ok(ReferenceSpec { output, inputs, source, tolerance: self.tolerance()? })
    }

    /// The argument that is judged.
    fn output(&self) -> Result<usize, LaunchError> {
        let has_memory = |&at: &usize| self.spec.shape_of(at).is_some();
        match &self.raw.output {
            Some(value) => number_of(value, self.args).filter(has_memory).ok_or_else(|| {
                self.refuse(
                    "output",
                    value,
                    "the name or the number of an [[arg]] that is a buffer, out or lse",
                )
            }),
            None => {
                let uninitialised = |at: &usize| matches!(&self.spec.args[*at], ArgSpec::Buffer(m) if m.init == Init::Uninitialised);
                let mut outputs = (0..self.args.len()).filter(uninitialised);
                match (outputs.next(), outputs.next()) {
                    (Some(only), None) => Ok(only),
                    _ => Err(self.refuse(
                        "output",
                        "(missing)",
                        format!(
                            "{ARGUMENT}: only a single uninitialised buffer is taken as the output by itself"
                        ),
                    )),
                }
            }
        }
    }

    fn memory(&self, at: usize) -> Memory {
        self.spec.shape_of(at).unwrap_or(Memory::new(BufferType::F32, 0, Init::Uninitialised))
    }

    /// Whether Python receives the argument if no inputs are listed: numbers, and buffers with contents.
    fn is_input(&self, at: usize) -> bool {
        match &self.spec.args[at] {
            ArgSpec::Scalar(_) => true,
            ArgSpec::Buffer(memory) => memory.init != Init::Uninitialised,
            ArgSpec::Tensor(tensor) => *tensor != problem::Tensor::Out,
            _ => false,
        }
    }

    fn inputs(&self) -> Result<Option<Vec<usize>>, LaunchError> {
        let Some(list) = &self.raw.inputs else { return Ok(None) };
        let readable = |&at: &usize| {
            self.spec.shape_of(at).is_some() || matches!(self.spec.args[at], ArgSpec::Scalar(_))
        };
        let one = |value: &toml::Value| {
            let refuse = || {
                self.refuse(
                    "inputs",
                    value,
                    "the name or the number of an [[arg]] that is a buffer, a tensor or a number",
                )
            };
            number_of(value, self.args).filter(readable).ok_or_else(refuse)
        };
        list.iter().map(one).collect::<Result<Vec<_>, _>>().map(Some)
    }

    fn builtin(&self, name: &str, inputs: &[usize], output: Memory) -> Result<ReferenceSource, LaunchError> {
        let raw = self.raw;
        let operation = || {
            let name = raw.operation.as_deref().unwrap_or("sum");
            Operation::named(name)
                .ok_or_else(|| self.refuse("operation", format!("\"{name}\""), Operation::ACCEPTED))
        };
        let builtin = match name {
            "softmax" => Builtin::Softmax,
            "layernorm" => Builtin::LayerNorm { eps: raw.eps.unwrap_or(1e-5) },
            "rmsnorm" => Builtin::RmsNorm { eps: raw.eps.unwrap_or(1e-6) },
            "gemm" => Builtin::Gemm { alpha: raw.alpha.unwrap_or(1.0), beta: raw.beta.unwrap_or(1.0) },
            "reduce" => Builtin::Reduce(operation()?),
            "scan" => Builtin::Scan { operation: operation()?, exclusive: raw.exclusive.unwrap_or(false) },
            "transpose" => Builtin::Transpose,
            "rope" => Builtin::Rope {
                base: raw.base.unwrap_or(10_000.0),
                interleaved: raw.interleaved.unwrap_or(false),
            },
            "cross_entropy" => Builtin::CrossEntropy,
            "attention" => Builtin::Attention { scale: raw.scale, causal: raw.causal.unwrap_or(false) },
            "attention_backward" => {
                let name = raw.gradient.as_deref().unwrap_or("(missing)");
                let gradient = Gradient::named(name)
                    .ok_or_else(|| self.refuse("gradient", format!("\"{name}\""), Gradient::ACCEPTED))?;
                let causal = raw.causal.unwrap_or(false);
                Builtin::AttentionBackward { gradient, scale: raw.scale, causal }
            }
            other => return Err(self.refuse("builtin", format!("\"{other}\""), Builtin::ACCEPTED)),
        };
        let views: Option<Vec<View>> =
            inputs.iter().map(|&at| self.spec.shape_of(at).map(|memory| memory.shaped())).collect();
        let fits = views.as_ref().is_some_and(|views| builtin.fits(views, &output.shaped()));
        if !fits {
            let shapes = views.iter().flatten().map(|v| format!("{:?}", v.shape())).collect::<Vec<_>>();
            let shapes = if shapes.is_empty() { "[]".to_owned() } else { shapes.join(", ") };
            let value = format!("{shapes} for an output of shape {:?}", output.shaped().shape());
            return Err(self.refuse("inputs", value, builtin.inputs()));
        }
        let work = builtin.work(&views.unwrap_or_default(), &output.shaped());
        if work > WORK_LIMIT {
            let accepted =
                format!("at most {WORK_LIMIT:.0e} of them, so that it ends in minutes; smaller shapes");
            return Err(self.refuse("builtin", format!("{work:.1e} operations"), accepted));
        }
        Ok(ReferenceSource::Builtin(builtin))
    }

    fn kernel(&self, path: &str) -> Result<ReferenceSource, LaunchError> {
        let raw = self.raw;
        let first = &self.spec.launches[0];
        let list = |d: ptx::Dim3| vec![d.0.into(), d.1.into(), d.2.into()];
        let launch = RawLaunch {
            entry: raw.entry.clone(),
            grid: raw.grid.clone().unwrap_or_else(|| list(first.grid)),
            cluster: raw.cluster.clone(),
            block: raw.block.clone().or_else(|| first.block.map(list)),
            dynamic_shared: raw.dynamic_shared,
            cooperative: raw.cooperative.or(Some(first.cooperative)),
            args: raw.args.clone(),
            ..RawLaunch::default()
        };
        let mut launch = step_of(&self.key, &launch, self.args)?;
        if raw.args.is_none() {
            launch.args.clone_from(&first.args);
        }
        Ok(ReferenceSource::Kernel { path: path.to_owned(), launch: Box::new(launch) })
    }

    fn python(&self, text: &str) -> Result<ReferenceSource, LaunchError> {
        let parts = text.rsplit_once(':').filter(|(path, function)| {
            let is_name = function.chars().all(|c| c.is_alphanumeric() || c == '_');
            !path.is_empty() && !function.is_empty() && is_name
        });
        let (path, function) =
            parts.ok_or_else(|| self.refuse("python", format!("\"{text}\""), "FILE.py:FUNCTION"))?;
        let seconds = self.raw.timeout.unwrap_or(TIMEOUT);
        if !(seconds > 0.0 && seconds <= 86_400.0) {
            return Err(self.refuse("timeout", seconds, "seconds, more than 0 and at most 86400"));
        }
        Ok(ReferenceSource::Python {
            path: path.to_owned(),
            function: function.to_owned(),
            timeout: Duration::from_secs_f64(seconds),
        })
    }

    fn tolerance(&self) -> Result<Tolerance, LaunchError> {
        let (atol, rtol) = (self.raw.atol, self.raw.rtol);
        for (key, value) in [("atol", atol), ("rtol", rtol)] {
            if let Some(value) = value.filter(|value| !(value.is_finite() && *value >= 0.0)) {
                return Err(self.refuse(key, value, "a finite number, 0 or more"));
            }
        }
        Ok(Tolerance { atol, rtol })
    }

    /// Rejects keys that the source does not use.
    fn check_keys(&self, source: &ReferenceSource) -> Result<(), LaunchError> {
        let raw = self.raw;
        let launch: &[&str] = &["entry", "grid", "cluster", "block", "dynamic_shared", "cooperative", "args"];
        let taken: &[&str] = match source {
            ReferenceSource::Kernel { .. } => launch,
            ReferenceSource::File { .. } => &[],
            ReferenceSource::Python { .. } => &["inputs", "timeout"],
            ReferenceSource::Builtin(builtin) => match builtin {
                Builtin::LayerNorm { .. } | Builtin::RmsNorm { .. } => &["inputs", "eps"],
                Builtin::Gemm { .. } => &["inputs", "alpha", "beta"],
                Builtin::Reduce(_) => &["inputs", "operation"],
                Builtin::Scan { .. } => &["inputs", "operation", "exclusive"],
                Builtin::Rope { .. } => &["inputs", "base", "interleaved"],
                Builtin::Attention { .. } => &["inputs", "scale", "causal"],
                Builtin::AttentionBackward { .. } => &["inputs", "gradient", "scale", "causal"],
                Builtin::Softmax | Builtin::Transpose | Builtin::CrossEntropy => &["inputs"],
            },
        };
        let given = [
            ("inputs", raw.inputs.is_some()),
            ("entry", raw.entry.is_some()),
            ("grid", raw.grid.is_some()),
            ("cluster", raw.cluster.is_some()),
            ("block", raw.block.is_some()),
            ("dynamic_shared", raw.dynamic_shared.is_some()),
            ("cooperative", raw.cooperative.is_some()),
            ("args", raw.args.is_some()),
            ("timeout", raw.timeout.is_some()),
            ("operation", raw.operation.is_some()),
            ("exclusive", raw.exclusive.is_some()),
            ("eps", raw.eps.is_some()),
            ("alpha", raw.alpha.is_some()),
            ("beta", raw.beta.is_some()),
            ("base", raw.base.is_some()),
            ("interleaved", raw.interleaved.is_some()),
            ("causal", raw.causal.is_some()),
            ("gradient", raw.gradient.is_some()),
            ("scale", raw.scale.is_some()),
        ];
        match given.into_iter().find(|(key, given)| *given && !taken.contains(key)) {
            None => Ok(()),
            Some((key, _)) => Err(LaunchError::value(
                format!("{}.{key}", self.key),
                "(given)",
                format!("no `{key}`, since {} takes none", source.words()),
            )),
        }
    }
}
