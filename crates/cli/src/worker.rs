//! The command `flashcore worker`: evaluates candidates for a run in a separate process. If this process
//! crashes, the run continues.

use evolve::evaluate::cuda::Allow;
use evolve::evaluate::model::Model;
use evolve::evaluate::{Cuda, EmulatedCard, Evaluator, Evaluators, GpuCard, TaskFault};
use evolve::workers::ServeError;
use evolve::{Target, workers};
use ledger::Reason;

use crate::Status;
use crate::args::Worker;
use crate::error::CliError;

pub fn worker(args: &Worker) -> Result<Status, CliError> {
    if args.watched {
        workers::end_with_parent();
    }
    let machine = args.machine.as_deref().map(calibrate::machine::read).transpose()?;
    let mut evaluators = Evaluators::default();
    let served = workers::serve(std::io::stdin().lock(), std::io::stdout(), |task| {
        evaluators.evaluate(task, |target| evaluator(target, args, machine))
    });
    match served {
        Ok(()) => Ok(Status::Passed),
        // The reader has closed the pipe: `CliError::Output` ends the worker without a message.
        Err(ServeError::Output(error)) => Err(CliError::Output(error)),
        Err(error) => Err(error.into()),
    }
}

fn evaluator(
    target: &Target,
    args: &Worker,
    machine: Option<&'static predict::Gpu>,
) -> Result<Box<dyn Evaluator>, TaskFault> {
    match target {
        Target::Cuda { .. } if args.emulator => {
            let card = EmulatedCard::new(kernels::Arch::SM_90);
            Ok(Box::new(Cuda::new(card, machine).watched(allow(args))))
        }
        Target::Cuda { ordinal } => {
            let card = GpuCard::open(*ordinal)?;
            let known = machine.or_else(|| predict::Gpu::of_device(&card.info().name));
            Ok(Box::new(Cuda::new(card, known).watched(allow(args))))
        }
        Target::Model { machine: name } => {
            let gpu = machine.or_else(|| predict::Gpu::named(name));
            let model = gpu.and_then(Model::of);
            Ok(Box::new(
                model
                    .ok_or_else(|| TaskFault::new(Reason::Device, format!("no machine is called {name}")))?,
            ))
        }
        Target::Cpu => {
            Err(TaskFault::new(Reason::Device, "the processor's plans are not evaluated by a worker"))
        }
    }
}

fn allow(args: &Worker) -> Allow {
    if args.watched {
        Box::new(|time| workers::allow(&mut std::io::stdout(), time))
    } else {
        Box::new(|_| {})
    }
}
