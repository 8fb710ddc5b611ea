use std::sync::Mutex;

use candle_core::{DType, Tensor};
use dp_core::{
    Backend, Buffer, Devices, DistributedDataParallel, Error, ParamStore, ReduceOp, Sgd, Trainer,
    World,
};

use crate::support::{
    builder, expect_error, failing_ranks, guarded, isolated, ones, ranks, ranks_of, values, world,
};

#[test]
fn results_come_in_rank_order() {
    let all = ranks(4, |rank| {
        std::thread::sleep(std::time::Duration::from_millis(
            5 * (4 - rank.rank() as u64),
        ));
        Ok((rank.rank(), rank.world_size()))
    });
    assert_eq!(all, [(0, 4), (1, 4), (2, 4), (3, 4)]);
}

#[test]
fn a_world_has_a_rank() {
    expect_error(World::threads(0), &["world_size", "at least one rank"]);
    expect_error(World::from_env_or_threads(0), &["world_size"]);
}

#[test]
fn ranks_compute_in_thread_pools_of_their_own() {
    let sizes = ranks_of(world(2).with_threads_per_rank(3), |_| {
        Ok(rayon::current_num_threads())
    });
    assert_eq!(sizes, [3, 3]);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let default = World::threads(2).expect("a positive world size");
    assert_eq!(default.threads_per_rank(), (cores / 2).max(1));
    assert_eq!(default.with_threads_per_rank(0).threads_per_rank(), 1);
}

#[test]
fn worlds_side_by_side_do_not_meet() {
    let runs: Vec<_> = (2..5)
        .map(|n| {
            std::thread::spawn(move || {
                ranks(n, move |rank| {
                    for i in 0..50 {
                        let mine = Buffer::from_vec(vec![(n * i) as i64; 10]);
                        let sum = rank.comm().all_reduce(mine, ReduceOp::Sum)?.wait()?;
                        assert_eq!(sum.as_slice::<i64>()?[0], (n * n * i) as i64);
                    }
                    Ok(())
                })
            })
        })
        .collect();
    for run in runs {
        run.join().expect("no rank fails");
    }
}

#[test]
fn a_rank_may_borrow_from_the_caller() {
    guarded(crate::support::HANG, || {
        let sum = Mutex::new(0);
        let result: dp_core::Result<()> = world(3).run(|rank| {
            *sum.lock().expect("not poisoned") += rank.rank();
            Ok(())
        });
        result.expect("no rank fails");
        assert_eq!(*sum.lock().expect("not poisoned"), 3);
    });
}

#[test]
fn deep_graphs_fit_the_stack() {
    ranks(2, |rank| {
        let store = ParamStore::new(rank.device());
        let w = ones(&builder(&store), (), "w")?;
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.5))?;
        let mut h: Tensor = w.clone();
        for _ in 0..20_000 {
            h = (h + 1.0)?;
        }
        trainer.backward(&h)?;
        trainer.step()?;
        assert_eq!(values(&w), [0.5]);
        Ok(())
    });
}

#[test]
fn c54_worlds_leave_no_threads_and_files_behind() {
    isolated(
        "world::c54_worlds_leave_no_threads_and_files_behind",
        &[],
        || {
            let count = |folder: &str| std::fs::read_dir(folder).map_or(0, Iterator::count);
            let one = || {
                ranks(3, |rank| {
                    let store = ParamStore::new(rank.device());
                    let w = ones(&store.var_builder(DType::F32), 10, "w")?;
                    let mut trainer =
                        DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1))?;
                    trainer.backward(&w.sum_all()?)?;
                    trainer.step().map(drop)
                });
            };
            let settled = || {
                // A thread that has been joined may take a moment to leave the list.
                std::thread::sleep(std::time::Duration::from_millis(100));
                (count("/proc/self/task"), count("/proc/self/fd"))
            };
            one();
            let (threads, files) = settled();
            (0..200).for_each(|_| one());
            let now = settled();
            assert!(
                now.0 <= threads && now.1 <= files,
                "{now:?}, before {threads} threads and {files} files"
            );
        },
    );
}

#[test]
fn backends_that_threads_or_this_build_do_not_have_are_refused() {
    let run = |backend| {
        let world = World::threads(2).expect("two ranks").with_backend(backend);
        world.run(|_| Ok(()))
    };
    let mpi: &[&str] = match cfg!(feature = "mpi") {
        true => &["threads do not talk over MPI"],
        false => &["no Mpi", "feature `mpi`", "dp-core/mpi"],
    };
    expect_error(run(Backend::Mpi), mpi);
    if !cfg!(feature = "nccl") {
        expect_error(
            run(Backend::Nccl),
            &["no Nccl", "feature `nccl`", "dp-core/nccl"],
        );
    }
}

#[test]
fn launchers_of_several_processes_are_refused() {
    let test = "world::launchers_of_several_processes_are_refused";
    for variable in ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"] {
        isolated(test, &[(variable, "4")], || {
            let error = expect_error(
                World::from_env_or_threads(2),
                &[&format!("{variable}=4"), "processes"],
            );
            assert!(matches!(error, Error::Environment { .. }));
        });
        isolated(test, &[(variable, "four")], || {
            expect_error(
                World::from_env_or_threads(2),
                &[variable, "four", "not a number"],
            );
        });
        // One process is no cluster.
        isolated(test, &[(variable, " 1 ")], || {
            let world = World::from_env_or_threads(3).expect("one process");
            assert_eq!(world.world_size(), 3);
        });
    }
    let torchrun = [
        ("RANK", "0"),
        ("WORLD_SIZE", "4"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ];
    isolated(test, &torchrun, || {
        if cfg!(feature = "nccl") {
            // Nobody meets before a run.
            let world = World::from_env().expect("four processes");
            assert_eq!((world.world_size(), world.ranks_here()), (4, 0..1));
            let mpi = world.with_backend(Backend::Mpi);
            expect_error(mpi.run(|_| Ok(())), &["MPI"]);
        } else {
            let parts = ["WORLD_SIZE=4", "torchrun", "feature `nccl`", "mpirun"];
            expect_error(World::from_env(), &parts);
            expect_error(World::from_env_or_threads(2), &parts);
        }
    });
    let mpirun = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")];
    isolated(test, &mpirun, || {
        if cfg!(any(feature = "mpi", feature = "nccl")) {
            // Nobody calls MPI before a run.
            let world = World::from_env().expect("four processes");
            assert_eq!((world.world_size(), world.ranks_here()), (4, 1..2));
            assert!(!world.is_main_process());
            let naive = world.with_backend(Backend::Naive);
            expect_error(naive.run(|_| Ok(())), &["Naive", "backend for threads"]);
        } else {
            let parts = ["OMPI_COMM_WORLD_SIZE=4", "feature `mpi`"];
            expect_error(World::from_env(), &parts);
            expect_error(World::from_env_or_threads(2), &parts);
        }
    });
    isolated(test, &[], || {
        expect_error(World::from_env(), &["no launcher"]);
        let threads = World::threads(3).expect("three ranks");
        assert_eq!(threads.ranks_here(), 0..3);
        assert!(threads.is_main_process());
        assert_eq!(
            World::from_env_or_threads(4)
                .expect("no launcher")
                .world_size(),
            4
        );
    });
}

#[test]
fn a_world_says_whether_it_is_on_gpus() {
    assert!(!world(2).is_on_gpus());
    assert!(!world(2).with_backend(Backend::Naive).is_on_gpus());
    assert!(world(2).with_devices(Devices::Cuda(vec![0])).is_on_gpus());
    // Its ranks get GPUs by themselves.
    assert!(world(2).with_backend(Backend::Nccl).is_on_gpus());
}

#[test]
fn a_device_that_cannot_be_used_is_named_before_a_rank_runs() {
    let world = world(2).with_devices(Devices::Cuda(vec![9999]));
    let error = failing_ranks(world, |_| unreachable!("no rank has a device"));
    let text = error.to_string();
    let expected = match cfg!(feature = "cuda") {
        true => "CUDA device 9999 cannot be used",
        false => "build with the feature `cuda`",
    };
    assert!(text.contains(expected), "{text}");
}
