// 132 CTAs, one lane streams S-byte stages through a ring, K on their way: blocked or interleaved over CTAs
#include <cstdio>
#include <cstdint>
#include <cuda_runtime.h>
__global__ void __launch_bounds__(32,1) stream(const char* p, long stages_per_cta, int S, int K, int mode, unsigned* sink, int gap){
  extern __shared__ __align__(128) char sm[];
  __shared__ __align__(8) unsigned long long bar[8];
  if(threadIdx.x) return;
  for(int i=0;i<8;i++) asm volatile("mbarrier.init.shared.b64 [%0],1;"::"r"((unsigned)__cvta_generic_to_shared(&bar[i])));
  asm volatile("fence.mbarrier_init.release.cluster;":::"memory");
  unsigned base=(unsigned)__cvta_generic_to_shared(sm);
  int c=blockIdx.x, n=gridDim.x;
  const int R=6;
  for(long it=0; it<stages_per_cta+K; it++){
    if(it>=K){ long j=it-K; unsigned b=(unsigned)__cvta_generic_to_shared(&bar[j%R]); unsigned ok=0;
      while(!ok) asm volatile("{.reg .pred q; mbarrier.test_wait.parity.shared::cta.b64 q,[%1],%2; selp.u32 %0,1,0,q;}":"=r"(ok):"r"(b),"r"((unsigned)((j/R)&1)):"memory"); }
    if(it<stages_per_cta){
      unsigned b=(unsigned)__cvta_generic_to_shared(&bar[it%R]);
      long idx = mode==0 ? (long)c*stages_per_cta+it : mode==1 ? it*n+c : mode==2 ? (it/4*n+c)*4+it%4 : (it/2*n+c)*2+it%2;
      const char* src=p+idx*S;
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;"::"r"(b),"r"(S):"memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;"::"r"(base+(unsigned)(it%R)*S),"l"(src),"r"(S),"r"(b),"l"(0x12F0000000000000UL):"memory");
    }
  }
  if(c<0) sink[0]=sm[0];
}
int main(){
  int S=28672, n=132; long per=240; size_t bytes=(size_t)S*n*per; char* p; unsigned* s; cudaMalloc(&p,bytes*2); cudaMalloc(&s,64); cudaMemset(p,1,bytes*2);
  cudaFuncSetAttribute(stream,cudaFuncAttributeMaxDynamicSharedMemorySize,6*S+128);
  cudaEvent_t a,b; cudaEventCreate(&a); cudaEventCreate(&b);
  for(int r=0;r<2;r++) for(int K=1;K<=6;K++) for(int m=0;m<4;m++){
    float best=1e9,sum=0; for(int q=0;q<8;q++){ cudaEventRecord(a); stream<<<n,32,6*S>>>(p+(q&1)*bytes,per,S,K,m,s,0); cudaEventRecord(b); cudaEventSynchronize(b); float t; cudaEventElapsedTime(&t,a,b); if(q>1){ sum+=t; best=t<best?t:best;} }
    printf("{\"k\": %d, \"mode\": %d, \"tbs\": %.3f, \"best\": %.3f, \"us_stage\": %.3f}\n",K,m,bytes/(sum/6)/1e9,bytes/best/1e9,sum/6*1e3/per);
  }
  printf("%s\n",cudaGetErrorString(cudaGetLastError()));
}
