use candle_core::{DType, Device, Tensor, Var};
use candle_nn::rnn::{LSTMConfig, RNN};
use candle_nn::{
    BatchNorm, Conv2d, Embedding, GroupNorm, LSTM, Linear, Module, ModuleT, Optimizer as _,
};
use candle_nn::{VarBuilder, VarMap};
use dp_core::{
    AdamW, BucketCaps, DdpConfig, DistributedDataParallel, ParamKind, ParamStore, Result, Trainer,
};

use crate::support::{Numbers, builder, ranks, values};

/// Unmodified layers of candle_nn, in two branches that meet in the loss.
struct Zoo {
    embedding: Embedding,
    lstm: LSTM,
    words: Linear,
    conv: Conv2d,
    batch_norm: BatchNorm,
    group_norm: GroupNorm,
    pixels: Linear,
}

impl Zoo {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            embedding: candle_nn::embedding(11, 8, vb.pp("embedding"))?,
            lstm: candle_nn::lstm(8, 6, LSTMConfig::default(), vb.pp("lstm"))?,
            words: candle_nn::linear(6, 5, vb.pp("words"))?,
            conv: candle_nn::conv2d(1, 4, 3, Default::default(), vb.pp("conv"))?,
            batch_norm: candle_nn::batch_norm(4, 1e-5, vb.pp("batch_norm"))?,
            group_norm: candle_nn::group_norm(2, 4, 1e-5, vb.pp("group_norm"))?,
            pixels: candle_nn::linear_no_bias(64, 5, vb.pp("pixels"))?,
        })
    }

    fn loss(&self, numbers: &mut Numbers) -> Result<Tensor> {
        let ids: Vec<u32> = (0..3 * 4).map(|_| numbers.below(11) as u32).collect();
        let ids = Tensor::from_vec(ids, (3, 4), &Device::Cpu)?;
        let states = self.lstm.seq(&self.embedding.forward(&ids)?)?;
        let words = self.words.forward(states.last().expect("four steps").h())?;

        let x = self.conv.forward(&numbers.tensor((3, 1, 6, 6)))?;
        let x = self.batch_norm.forward_t(&x, true)?.tanh()?;
        let x = self.group_norm.forward(&x)?.tanh()?;
        let pixels = self.pixels.forward(&x.flatten_from(1)?)?;
        Ok((words - pixels)?.sqr()?.mean_all()?)
    }
}

const NUM_NAMED: usize = 16;

#[test]
fn unmodified_layers_train_as_with_varmap_to_the_bit() {
    ranks(1, |rank| {
        let store = ParamStore::new(rank.device()).with_seed(21);
        let model = Zoo::new(builder(&store))?;
        assert_eq!(store.params().len(), NUM_NAMED);

        let varmap = VarMap::new();
        for p in store.params() {
            let var = Var::from_tensor(&p.tensor().copy()?)?;
            varmap
                .data()
                .lock()
                .expect("not poisoned")
                .insert(p.name().to_string(), var);
        }
        let twin = Zoo::new(VarBuilder::from_varmap(&varmap, DType::F32, rank.device()))?;
        assert_eq!(varmap.all_vars().len(), NUM_NAMED);
        let mut optimizer = candle_nn::AdamW::new_lr(varmap.all_vars(), 1e-2)?;

        let config = DdpConfig::default().with_bucket_caps(BucketCaps::new(500)?);
        let mut trainer =
            DistributedDataParallel::with_config(store, rank.comm(), AdamW::with_lr(1e-2), config)?;
        let before = trainer.store().sha256()?;
        for step in 0..10 {
            let loss = model.loss(&mut Numbers::new(step))?;
            let expected = twin.loss(&mut Numbers::new(step))?;
            assert_eq!(values(&loss), values(&expected), "step {step}");
            trainer.backward(&loss)?;
            assert!(trainer.step()?.unused.is_empty());
            optimizer.backward_step(&expected)?;
            let data = varmap.data().lock().expect("not poisoned");
            for p in trainer.store().params() {
                assert_eq!(
                    values(p.tensor()),
                    values(&data[p.name()]),
                    "{} after step {step}",
                    p.name()
                );
            }
        }
        assert_ne!(trainer.store().sha256()?, before);
        // Evaluation reads the statistics that training wrote.
        let x = Numbers::new(3).tensor((2, 4, 3, 3));
        let (a, b) = (
            model.batch_norm.forward_t(&x, false)?,
            twin.batch_norm.forward_t(&x, false)?,
        );
        assert_eq!(values(&a), values(&b));
        Ok(())
    });
}

#[test]
fn replicas_of_unmodified_layers_stay_equal() {
    for world_size in [2, 3] {
        let digests = ranks(world_size, |rank| {
            // No common seed: rank 0's values count.
            let store = ParamStore::new(rank.device()).with_seed(rank.rank() as u64);
            let model = Zoo::new(builder(&store))?;
            let mut trainer =
                DistributedDataParallel::new(store, rank.comm(), AdamW::with_lr(1e-2))?;
            let statistics = |t: &DistributedDataParallel<AdamW>| {
                values(
                    t.store()
                        .get("batch_norm.running_mean")
                        .expect("a buffer")
                        .tensor(),
                )
            };
            assert_eq!(statistics(&trainer), [0.0; 4]);
            let mut digests = Vec::new();
            for step in 0..5 {
                let mut data = Numbers::new(1000 * rank.rank() as u64 + step);
                trainer.backward(&model.loss(&mut data)?)?;
                trainer.step()?;
                digests.push(trainer.store().sha256()?);
            }
            assert_ne!(statistics(&trainer), [0.0; 4]);
            Ok(digests)
        });
        assert!(digests.iter().all(|d| *d == digests[0]), "{digests:?}");
        assert_ne!(digests[0][3], digests[0][4]);
    }
}

#[test]
fn statistics_are_buffers_and_nobody_trains_them() {
    let store = ParamStore::new(&Device::Cpu);
    let vb = builder(&store);
    Zoo::new(vb.clone()).expect("new names");
    let buffers: Vec<_> = store
        .params()
        .into_iter()
        .filter(|p| p.kind() == ParamKind::Buffer)
        .collect();
    let names: Vec<&str> = buffers.iter().map(|p| p.name()).collect();
    assert_eq!(names, ["batch_norm.running_mean", "batch_norm.running_var"]);
    let all: usize = store.params().iter().map(|p| p.num_elements()).sum();
    assert_eq!(store.num_trained(), all - 8);
    // Another rule replaces this one.
    let store = ParamStore::new(&Device::Cpu).with_buffers(|n| n == "steps");
    let vb = builder(&store);
    let kind = |name: &str| {
        vb.get(2, name).expect("a new name");
        store.get(name).expect("just made").kind()
    };
    assert_eq!(
        (kind("steps"), kind("running_mean")),
        (ParamKind::Buffer, ParamKind::Trained)
    );
}
