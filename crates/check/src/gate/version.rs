//! An earlier version of a kernel as its reference.

use std::path::PathBuf;
use std::sync::Arc;

use emu::Buffer;

use super::{CheckReport, Feed, Settings};
use crate::launchfile::{Bound, Init, LaunchStep, Memory, Role};
use crate::reference::{Reference, ReferenceSource, Tolerance};

/// Why an earlier version cannot be a reference.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VersionError {
    #[error("the launch has {0} kernels, and an earlier version is a launch of one")]
    Launches(usize),
    #[error("its buffer {index} has {found} bytes, where the kernel has {wanted}")]
    Buffer { index: usize, found: usize, wanted: usize },
    #[error("it has {found} buffers, and the kernel has {wanted}")]
    Buffers { found: usize, wanted: usize },
}

/// Makes an earlier version of a kernel, bound to the same launch, the reference of each buffer that it
/// wrote and nothing else judges. `check` is its report under `settings`, which keep its outputs. `path`
/// names it in messages.
///
/// # Errors
/// When the version has other buffers, or either launch has several kernels.
pub fn judge_by_version(
    bound: &mut Bound,
    path: &str,
    earlier: &Bound,
    (settings, check): (&Settings, &CheckReport),
) -> Result<(), VersionError> {
    if let Some(several) = [&*bound, earlier].map(|bound| bound.steps().count()).iter().find(|&&n| n > 1) {
        return Err(VersionError::Launches(*several));
    }
    let [wanted, found] = [&*bound, earlier].map(|bound| bound.kernel.buffers.as_slice());
    if found.len() != wanted.len() {
        return Err(VersionError::Buffers { found: found.len(), wanted: wanted.len() });
    }
    let mut all = found.iter().zip(wanted).map(|(found, wanted)| (found.bytes, wanted.bytes)).enumerate();
    if let Some((index, (found, wanted))) = all.find(|(_, (found, wanted))| found != wanted) {
        return Err(VersionError::Buffer { index, found, wanted });
    }
    let first = settings.runs_of(earlier).into_iter().next();
    let feed = first.and_then(|(style, seed, _)| Feed::draw(earlier, style, seed));
    let before = feed.map_or_else(Vec::new, |feed| feed.buffers(earlier));
    let was_written = |index: usize, memory: &Memory| {
        let before = before.get(index).map(Buffer::to_bytes);
        memory.init == Init::Uninitialised || before.as_ref() != check.outputs.get(index)
    };
    let kernel = Arc::new(earlier.kernel.clone());
    let launch = LaunchStep {
        entry: None,
        grid: kernel.launch.grid,
        cluster: Some(kernel.launch.cluster),
        block: Some(kernel.launch.block),
        dynamic_shared: kernel.launch.dynamic_shared,
        cooperative: earlier.is_cooperative(0),
        args: Vec::new(),
        listed: false,
    };
    let source = ReferenceSource::Kernel { path: path.to_owned(), launch: Box::new(launch) };
    let outputs = bound.kernel.buffers.iter().zip(&bound.roles).enumerate();
    let references = outputs.filter_map(|(output, (buffer, role))| {
        let Role::Fill(memory) = *role else { return None };
        let is_judged = bound.references.iter().any(|reference| reference.output == output);
        (was_written(output, &memory) && !is_judged).then(|| Reference {
            name: buffer.name.clone(),
            output,
            memory,
            inputs: Vec::new(),
            source: source.clone(),
            tolerance: Tolerance::default(),
            kernel: Some(kernel.clone()),
            elements: None,
            folder: PathBuf::new(),
        })
    });
    let references: Vec<Reference> = references.collect();
    bound.references.extend(references);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{VersionError, judge_by_version};
    use crate::gate::{CheckReport, Settings, Verdict, check_kernel};
    use crate::launchfile::{Bound, LaunchSpec};

    /// Each thread stores `value` times its index.
    fn kernel(value: u32, elements: usize) -> Bound {
        let module = format!(
            ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 out)\n{{\n\
             .reg .b64 %rd<3>;\n.reg .b32 %r<3>;\nld.param.u64 %rd1, [out];\nmov.u32 %r1, %tid.x;\n\
             mul.wide.u32 %rd2, %r1, 4;\nadd.u64 %rd1, %rd1, %rd2;\nmul.lo.u32 %r2, %r1, {value};\n\
             st.global.u32 [%rd1], %r2;\nret;\n}}\n"
        );
        let launch = format!(
            "[launch]\nentry = \"k\"\ngrid = [1]\nblock = [32]\n\
             [[arg]]\nrole = \"buffer\"\ndtype = \"u32\"\nelements = {elements}\n"
        );
        let module = ptx::parse(&module).unwrap().verify().unwrap();
        launch.parse::<LaunchSpec>().unwrap().bind(module).unwrap()
    }

    #[test]
    fn outputs_are_judged_by_those_of_the_earlier_version() {
        for (value, verdict) in [(3, Verdict::Passed), (4, Verdict::Failed)] {
            let mut bound = kernel(value, 32);
            let (settings, old) = (Settings { keep_outputs: true, ..Settings::quick() }, kernel(3, 32));
            let passed = check_kernel(&old, &settings).unwrap();
            judge_by_version(&mut bound, "old.ptx", &old, (&settings, &passed)).unwrap();
            let check = check_kernel(&bound, &settings).unwrap();
            assert_eq!(check.verdict, verdict, "{:?}", check.reasons);
            assert_eq!(check.judgements[0].by, "the kernel in old.ptx");
            assert_eq!(check.judgements[0].wrong, if value == 3 { 0 } else { 31 });
        }
    }

    #[test]
    fn a_version_with_other_buffers_is_no_reference() {
        let report = (&Settings::quick(), &CheckReport::empty());
        let error = judge_by_version(&mut kernel(3, 32), "old.ptx", &kernel(3, 64), report).unwrap_err();
        assert_eq!(error, VersionError::Buffer { index: 0, found: 256, wanted: 128 });
    }
}
