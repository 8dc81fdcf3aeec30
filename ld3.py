import subprocess,collections,concurrent.futures as f,sys
def one(i):
    h=["--http1.1","--http2"][i%2]
    r=subprocess.run(["curl","-sS","-k","-m","6",h,"-H","Content-Type: application/json","-H","Expect:","-H","Authorization: Bearer sk-known","--data-binary","@run/above","-o","/dev/null","-w","%{http_code}","https://127.0.0.1:18443/v1/chat/completions"],capture_output=True,text=True)
    return h,r.stdout,r.stderr[:22]
with f.ThreadPoolExecutor(6) as p: c=collections.Counter(p.map(one,range(40)))
for x in sorted(c.items()): print(x)
