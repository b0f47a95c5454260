//! The entry points of [`Simd`](super::Simd) that run a step in a function compiled for an instruction set.

/// The entry points for the instruction set whose token is `$set` and which has the features. Wherever a
/// token exists, the processor has them.
macro_rules! compiled_steps {
    ($set:ty, target_feature(enable = $features:literal)) => {
        fn step<const VECTORS: usize>(self, step: $crate::tile::Step<'_>) {
            #[target_feature(enable = $features)]
            fn compiled<const VECTORS: usize>(s: $set, step: $crate::tile::Step<'_>) {
                $crate::tile::run_step::<$set, VECTORS>(s, step);
            }
            unsafe { compiled::<VECTORS>(self, step) }
        }

        $crate::simd::compiled::compiled_steps! { $set, $features,
            step_dims(step: $crate::tile::Step<'_>) = $crate::dims::run_step;
            backward(stage: $crate::backward::TileStep<'_>) = $crate::backward::run;
            evaluate(
                program: &$crate::programs::Compiled<'_>,
                values: &mut $crate::programs::Values,
                region: $crate::programs::Region<'_>
            ) = $crate::programs::evaluate;
            compute(
                operation: $crate::programs::Operation<'_>,
                loads: &mut $crate::programs::Loads,
                to: &mut [f32]
            ) = $crate::programs::compute;
            read(from: &[f32]) = $crate::peak::sum;
        }

        fn products(self, rounds: usize) -> f64 {
            #[target_feature(enable = $features)]
            fn compiled(s: $set, rounds: usize) -> f64 {
                $crate::peak::chains(s, rounds)
            }
            unsafe { compiled(self, rounds) }
        }
    };
    ($set:ty, $features:literal,
        $($name:ident($($argument:ident: $type:ty),+) = $run:path;)+) => {$(
        fn $name(self, $($argument: $type),+) {
            #[target_feature(enable = $features)]
            fn compiled(s: $set, $($argument: $type),+) {
                $run(s, $($argument),+);
            }
            unsafe { compiled(self, $($argument),+) }
        }
    )+};
}
pub(super) use compiled_steps;
